//! The older text format of Prometheus, made from OpenMetrics text: there the name of a counter in HELP and TYPE is
//! that of its samples, with `_total`, and there are neither units nor an end mark.

/// The type of this format.
pub(crate) const TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Turns what `prometheus-client` writes into it.
pub(crate) fn of(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len() + 1024);
    let mut help: Option<(&str, &str)> = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            if let Some((_, words)) = help.take().filter(|(of, _)| *of == name) {
                text.push_str(&format!("# HELP {name}{suffix} {words}\n"));
            }
            text.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
        } else if !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_infos_are_named_as_their_samples() {
        let open = "# HELP a_b Some words.\n# TYPE a_b counter\na_b_total{k=\"v\"} 3\n# HELP i Info.\n# TYPE i info\n\
                    i_info{version=\"1\"} 1\n# HELP g A gauge.\n# TYPE g gauge\n# UNIT g seconds\ng 1\n# EOF\n";
        let classic = "# HELP a_b_total Some words.\n# TYPE a_b_total counter\na_b_total{k=\"v\"} 3\n\
                       # HELP i_info Info.\n# TYPE i_info gauge\ni_info{version=\"1\"} 1\n\
                       # HELP g A gauge.\n# TYPE g gauge\ng 1\n";
        assert_eq!(of(open), classic);
    }
}
