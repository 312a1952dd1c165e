//! The table of a benchmark: one row per measure, one column per count, the target and whether it was met. As plain
//! text and as JSON.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// What a number is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Milliseconds.
    Ms,
    /// Seconds.
    S,
    /// A ratio.
    Times,
    /// A number of things.
    Count,
}

/// What a number should be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Target {
    /// At most this.
    AtMost(f64),
    /// Less than this.
    Below(f64),
    /// At least this.
    AtLeast(f64),
    /// Exactly this.
    Is(f64),
    /// This, give or take.
    About(f64, f64),
}

#[derive(Debug)]
struct Row {
    measure: String,
    unit: Unit,
    target: Option<Target>,
    /// By count; `None`: was to be measured and could not be.
    values: BTreeMap<u32, Option<f64>>,
}

/// All rows, in the order they were first set.
#[derive(Debug)]
pub(crate) struct Table {
    counts: Vec<u32>,
    rows: Vec<Row>,
}

impl Table {
    /// An empty one with a column per count.
    pub(crate) fn new(counts: &[u32]) -> Self {
        Self { counts: counts.to_vec(), rows: vec![] }
    }

    /// Notes one value. `None`: it should be there and is not, which misses every target. Of several at one count that
    /// which misses its target stays.
    pub(crate) fn set(
        &mut self,
        measure: impl Into<String>,
        unit: Unit,
        target: Option<Target>,
        count: u32,
        value: Option<f64>,
    ) {
        let measure = measure.into();
        let row = match self.rows.iter_mut().position(|r| r.measure == measure) {
            Some(at) => &mut self.rows[at],
            None => {
                self.rows.push(Row { measure, unit, target, values: BTreeMap::new() });
                let last = self.rows.len() - 1;
                &mut self.rows[last]
            }
        };
        let missed = |v: &Option<f64>| target.is_some_and(|t| !v.is_some_and(|v| t.met_by(v)));
        if !row.values.get(&count).is_some_and(missed) {
            row.values.insert(count, value);
        }
    }

    /// Takes a value back.
    pub(crate) fn forget(&mut self, measure: &str, count: u32) {
        if let Some(row) = self.rows.iter_mut().find(|r| r.measure == measure) {
            row.values.remove(&count);
        }
    }

    /// Whether every target was met at every count.
    pub(crate) fn all_met(&self) -> bool {
        self.rows.iter().all(|row| row.met() != Some(false))
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let mut lines = vec![vec!["measure".to_owned()]];
        lines[0].extend(self.counts.iter().map(u32::to_string));
        lines[0].extend(["target".to_owned(), "met".to_owned()]);
        for row in &self.rows {
            let mut line = vec![format!("{}{}", row.measure, row.unit.suffix())];
            line.extend(self.counts.iter().map(|count| match row.values.get(count) {
                Some(Some(value)) => row.unit.number(*value),
                Some(None) => "absent".to_owned(),
                None => "-".to_owned(),
            }));
            line.push(row.target.map_or_else(|| "-".to_owned(), |t| t.text(row.unit)));
            line.push(row.met().map_or("-", |met| if met { "yes" } else { "no" }).to_owned());
            lines.push(line);
        }
        let widths: Vec<usize> = (0..lines[0].len())
            .map(|column| lines.iter().map(|l| l[column].chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for line in &lines {
            let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
                if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            text += cells.collect::<Vec<_>>().join("  ").trim_end();
            text.push('\n');
        }
        text
    }

    /// For programs: a list of rows.
    pub(crate) fn json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            let values: BTreeMap<String, Option<f64>> =
                row.values.iter().map(|(count, value)| (count.to_string(), *value)).collect();
            json!({
                "measure": row.measure,
                "unit": row.unit.name(),
                "values": values,
                "target": row.target.map(|t| t.text(row.unit)),
                "met": row.met(),
            })
        });
        Value::Array(rows.collect())
    }
}

impl Row {
    /// `None` without a target.
    fn met(&self) -> Option<bool> {
        let target = self.target?;
        Some(self.values.values().all(|value| value.is_some_and(|v| target.met_by(v))))
    }
}

impl Target {
    fn met_by(self, value: f64) -> bool {
        match self {
            Target::AtMost(most) => value <= most,
            Target::Below(limit) => value < limit,
            Target::AtLeast(least) => value >= least,
            Target::Is(wanted) => (value - wanted).abs() < f64::EPSILON,
            Target::About(wanted, off) => (value - wanted).abs() <= off,
        }
    }

    fn text(self, unit: Unit) -> String {
        let number = |n| {
            let text = unit.number(n);
            // A target is a round number.
            if text.contains('.') {
                text.trim_end_matches('0').trim_end_matches('.').to_owned()
            } else {
                text
            }
        };
        match self {
            Target::AtMost(n) => format!("<= {}", number(n)),
            Target::Below(n) => format!("< {}", number(n)),
            Target::AtLeast(n) => format!(">= {}", number(n)),
            Target::Is(n) => number(n),
            Target::About(n, off) => format!("{} +- {}", number(n), number(off)),
        }
    }
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Ms => "milliseconds",
            Unit::S => "seconds",
            Unit::Times => "ratio",
            Unit::Count => "count",
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Unit::Ms => ", ms",
            Unit::S => ", s",
            Unit::Times | Unit::Count => "",
        }
    }

    fn number(self, value: f64) -> String {
        match self {
            Unit::Ms => format!("{value:.1}"),
            Unit::S | Unit::Times => format!("{value:.2}"),
            Unit::Count => format!("{value:.0}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&[4000, 10000]);
        table.set("ready", Unit::Ms, Some(Target::AtMost(1000.0)), 4000, Some(212.34));
        table.set("ready", Unit::Ms, Some(Target::AtMost(1000.0)), 10000, Some(1000.5));
        table.set("leaked", Unit::Count, Some(Target::Is(0.0)), 4000, None);
        table.set("blocking", Unit::S, Some(Target::About(2.0, 0.5)), 10000, Some(2.5));
        table.set("floor", Unit::S, None, 4000, Some(3.0));
        table
    }

    #[test]
    fn of_several_rounds_the_one_that_misses_stays() {
        let mut table = Table::new(&[4000]);
        for failed in [0.0, 3.0, 0.0] {
            table.set("failed", Unit::Count, Some(Target::Is(0.0)), 4000, Some(failed));
            table.set("floor", Unit::S, None, 4000, Some(failed));
        }
        let value = |table: &Table, row: usize| table.json()[row]["values"]["4000"].as_f64();
        assert_eq!((value(&table, 0), value(&table, 1)), (Some(3.0), Some(0.0)));
        table.forget("failed", 4000);
        table.set("failed", Unit::Count, Some(Target::Is(0.0)), 4000, Some(0.0));
        assert_eq!(value(&table, 0), Some(0.0));
    }

    #[test]
    fn the_text_shows_values_targets_and_what_was_met() {
        let expected = "\
measure       4000   10000     target  met
ready, ms    212.3  1000.5    <= 1000   no
leaked      absent       -          0   no
blocking, s      -    2.50  2 +- 0.5  yes
floor, s      3.00       -          -    -
";
        // Widths follow the longest cell of each column.
        let squeeze = |text: &str| -> Vec<Vec<String>> {
            text.lines()
                .map(|l| l.split("  ").map(str::trim).filter(|c| !c.is_empty()).map(str::to_owned).collect())
                .collect()
        };
        let text = table().text();
        assert_eq!(squeeze(&text), squeeze(expected));
        let ends: Vec<usize> = text.lines().map(|l| l.chars().count()).collect();
        assert!(ends.iter().all(|n| *n == ends[0]), "columns are not aligned:\n{text}");
    }

    #[test]
    fn one_miss_or_one_absent_value_is_a_miss() {
        assert!(!table().all_met());
        let mut good = Table::new(&[1]);
        good.set("a", Unit::Times, Some(Target::AtLeast(100.0)), 1, Some(100.0));
        good.set("b", Unit::Ms, Some(Target::Below(50.0)), 1, Some(49.9));
        assert!(good.all_met());
        good.set("b", Unit::Ms, Some(Target::Below(50.0)), 1, Some(50.0));
        assert!(!good.all_met());
    }

    #[test]
    fn json_has_every_value() {
        let json = table().json();
        assert_eq!(json[0]["values"]["10000"], 1000.5);
        assert_eq!(json[1]["values"]["4000"], Value::Null);
        assert_eq!(json[1]["met"], false);
        assert_eq!(json[3]["met"], Value::Null);
    }
}
