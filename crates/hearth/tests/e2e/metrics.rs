//! `/metrics` of a daemon that works: clean text, and every name and label that the files in `deploy/observability`
//! ask for.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::http;
use crate::node::{Node, Wish, cannot, in_path, text};
use crate::telemetry::metric;

/// Labels that the scraper adds, and those of functions.
const OF_PROMETHEUS: [&str; 3] = ["instance", "job", "le"];

fn deployed(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy/observability").join(file)
}

/// Sample names with the labels each has.
fn samples(metrics: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for line in metrics.lines().filter(|l| !l.starts_with('#') && !l.is_empty()) {
        let end = line.find(['{', ' ']).expect("a value");
        let labels = found.entry(line[..end].to_owned()).or_default();
        labels.extend(labels_of(&line[end..]).into_iter().map(|(name, _)| name));
    }
    found
}

/// Names and values in `{a="b",c=~"d"}` at the beginning of `text`.
fn labels_of(text: &str) -> Vec<(String, String)> {
    let mut labels = vec![];
    let Some(mut rest) = text.strip_prefix('{') else { return labels };
    while let Some(quote) = rest.find('"') {
        let name = rest[..quote].trim_start_matches([',', ' ']).trim_end_matches(['=', '~', '!', ' ']);
        let value = &rest[quote + 1..];
        let end = value.find('"').expect("a closing quote");
        labels.push((name.to_owned(), value[..end].to_owned()));
        rest = &value[end + 1..];
        if rest.starts_with('}') {
            break;
        }
    }
    labels
}

/// Each metric an expression names, with the labels it asks for.
fn asked(expression: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut found = vec![];
    let mut rest = expression;
    while let Some(at) = rest.find("hearth_") {
        rest = &rest[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        found.push((rest[..end].to_owned(), labels_of(&rest[end..])));
        rest = &rest[end..];
    }
    found
}

/// The labels in `by (a, b)`.
fn grouped(expression: &str) -> Vec<String> {
    let lists = expression.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
    lists.flat_map(|list| list.split(',')).map(|label| label.trim().to_owned()).collect()
}

/// The expressions of a dashboard and of the alert rules.
fn expressions() -> Vec<String> {
    let dashboard = std::fs::read_to_string(deployed("grafana-dashboard.json")).expect("the dashboard");
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").clone();
    let targets = panels.iter().flat_map(|p| p["targets"].as_array().expect("targets").clone());
    let mut all: Vec<String> = targets.map(|t| t["expr"].as_str().expect("expr").to_owned()).collect();
    let alerts = std::fs::read_to_string(deployed("alerts.yaml")).expect("the alerts");
    let expr = alerts.lines().filter_map(|l| l.trim().strip_prefix("expr: "));
    all.extend(expr.map(str::to_owned));
    all
}

/// What `promtool check metrics` objects to, as far as it concerns metrics like these. Our own reading of its rules;
/// where promtool is there it is asked as well.
fn lint(metrics: &str) -> Vec<String> {
    let mut wrong = vec![];
    let (mut helps, mut kinds) = (BTreeMap::new(), BTreeMap::new());
    for line in metrics.lines() {
        if let Some((name, words)) = line.strip_prefix("# HELP ").and_then(|l| l.split_once(' ')) {
            if helps.insert(name, words).is_some() {
                wrong.push(format!("{name}: HELP twice"));
            }
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|l| l.split_once(' '))
            && kinds.insert(name, kind).is_some()
        {
            wrong.push(format!("{name}: TYPE twice"));
        }
    }
    for (name, kind) in &kinds {
        let ends = |suffix: &str| name.ends_with(suffix);
        if helps.get(name).is_none_or(|h| h.trim().is_empty()) {
            wrong.push(format!("{name}: no help text"));
        }
        if (*kind == "counter") != ends("_total") {
            wrong.push(format!("{name}: _total is for counters, which it is {kind}"));
        }
        if ends("_count") || ends("_sum") || ends("_bucket") {
            wrong.push(format!("{name}: a suffix of histograms"));
        }
        if name.contains(kind) || name.chars().any(|c| c.is_ascii_uppercase()) {
            wrong.push(format!("{name}: its type or capitals in its name"));
        }
        if ["milliseconds", "_ms", "minutes", "kilobytes", "megabytes"].iter().any(|unit| ends(unit)) {
            wrong.push(format!("{name}: no base unit"));
        }
    }
    for name in samples(metrics).keys() {
        let base = ["_bucket", "_count", "_sum"].iter().find_map(|s| name.strip_suffix(s));
        let histogram = base.is_some_and(|b| kinds.get(b) == Some(&"histogram"));
        if !histogram && !kinds.contains_key(name.as_str()) {
            wrong.push(format!("{name}: no TYPE"));
        }
    }
    let mut lines: Vec<&str> = metrics.lines().filter(|l| !l.starts_with('#')).collect();
    let all = lines.len();
    lines.sort_unstable_by_key(|l| l.rsplit_once(' ').map(|(series, _)| series));
    lines.dedup_by_key(|l| l.rsplit_once(' ').map(|(series, _)| series));
    if lines.len() < all {
        wrong.push("a series twice".into());
    }
    wrong
}

#[test]
fn the_lint_finds_what_it_looks_for() {
    let good = "# HELP a_total Words\n# TYPE a_total counter\na_total 1\n";
    assert_eq!(lint(good), Vec::<String>::new());
    for bad in [
        "# TYPE a_total counter\na_total 1\n",
        "# HELP a Words\n# TYPE a counter\na 1\n",
        "# HELP a_ms Words\n# TYPE a_ms gauge\na_ms 1\n",
        "a 1\n",
        "# HELP a Words\n# TYPE a gauge\na{b=\"c\"} 1\na{b=\"c\"} 2\n",
    ] {
        assert!(!lint(bad).is_empty(), "{bad}");
    }
}

#[test]
fn metrics_are_clean_and_have_all_that_dashboard_and_alerts_ask_for() {
    if cannot("metrics_are_clean_and_have_all_that_dashboard_and_alerts_ask_for", true) {
        return;
    }
    let mut node = Node::new(&Wish::default());
    node.set_test("process_vmm = true\n[metrics]\nper_sandbox = true");
    node.start_daemon();
    node.warm_up();
    node.ok(&["create", "busybox", "--name", "a", "--vmm", "process", "--disk", "16"]);
    node.ok(&["node", "reconcile"]);
    // It comes with the first round of questions.
    let cpu = "hearth_vmm_cpu_seconds_total{template=\"busybox\"}";
    let end = Instant::now() + Duration::from_secs(60);
    while !http::get(&node, "/metrics").body.contains(cpu) {
        assert!(Instant::now() < end, "{}", node.log_text());
        std::thread::sleep(Duration::from_millis(100));
    }
    let metrics = http::get(&node, "/metrics");
    assert!(metrics.head.contains("content-type: text/plain; version=0.0.4"), "{}", metrics.head);
    assert_eq!(lint(&metrics.body), Vec::<String>::new(), "{}", metrics.body);
    let open = http::get_with(&node, "/metrics", "Accept: application/openmetrics-text; version=1.0.0\r\n");
    let open = open.expect("an answer");
    assert!(open.head.contains("content-type: application/openmetrics-text"), "{}", open.head);
    assert!(open.body.ends_with("# EOF\n"), "{}", open.body);

    // One sandbox more is one series more, and no other metric grows with them.
    node.ok(&["create", "busybox", "--name", "b", "--vmm", "process", "--disk", "16"]);
    let more = http::get(&node, "/metrics").body;
    assert_eq!(more.lines().count(), metrics.body.lines().count() + 1, "{more}");
    let thousand = more.len() + 1000 * more.len().saturating_sub(metrics.body.len());
    assert!(thousand < 2_000_000, "a scrape of a thousand sandboxes would have {thousand} bytes");

    let there = samples(&metrics.body);
    for expression in expressions() {
        let asked = asked(&expression);
        assert!(!asked.is_empty(), "no metric of ours in {expression}");
        let mut labels = BTreeSet::new();
        for (name, wanted) in asked {
            let has =
                there.get(&name).unwrap_or_else(|| panic!("{expression}: no {name} in {}", metrics.body));
            labels.extend(has.iter().cloned());
            for (label, value) in wanted.iter().filter(|(l, _)| !OF_PROMETHEUS.contains(&l.as_str())) {
                assert!(has.contains(label), "{expression}: {name} has no label {label}");
                // A value that is none of the metric's would be an alert that never fires.
                for value in value.split('|') {
                    let pair = format!("{label}=\"{value}\"");
                    let line = |l: &str| l.starts_with(&name) && l.contains(&pair);
                    assert!(metrics.body.lines().any(line), "{expression}: no {pair}");
                }
            }
        }
        for label in grouped(&expression) {
            let known = labels.contains(&label) || OF_PROMETHEUS.contains(&label.as_str());
            assert!(known, "{expression}: nothing has the label {label}");
        }
    }
    if in_path("promtool") {
        let mut promtool = Command::new("promtool");
        promtool
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut promtool = promtool.spawn().expect("promtool");
        promtool.stdin.take().expect("stdin").write_all(metrics.body.as_bytes()).expect("the metrics");
        let out = promtool.wait_with_output().expect("its end");
        let said = format!("{}{}", text(&out.stdout), text(&out.stderr));
        assert!(out.status.success() && said.trim().is_empty(), "{said}");
        let rules = Command::new("promtool").arg("check").arg("rules").arg(deployed("alerts.yaml")).output();
        let rules = rules.expect("promtool");
        assert!(rules.status.success(), "{}{}", text(&rules.stdout), text(&rules.stderr));
    } else {
        hearth_testkit::report(
            "promtool is not here: /metrics was held against our own reading of its rules",
        );
    }
    // What one that is gone has used stays in the sum.
    let used = metric(&node, cpu);
    node.ok(&["rm", "a", "b"]);
    assert!(used > 0.0 && metric(&node, cpu) >= used, "{used} s, then {}", metric(&node, cpu));
    node.end_clean();
}
