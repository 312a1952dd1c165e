//! The parts of the benchmark that need no daemon run, count right, and leave nothing.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::process::Command;

use hearth_host::test_support::{in_private_namespaces, is_root};
use serde_json::Value;

#[test]
fn floor_and_serial_way_are_measured_and_leave_nothing() {
    if !is_root() {
        hearth_testkit::skip("floor_and_serial_way_are_measured_and_leave_nothing", "needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("startup.json");
    in_private_namespaces(|| {
        let names = || -> BTreeSet<_> {
            std::fs::read_dir("/run/netns").unwrap().map(|e| e.unwrap().file_name()).collect()
        };
        let out = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(["bench", "startup", "--slots", "6,9", "--only", "floor,serial", "--sample", "2", "--json"])
            .arg(&json)
            // Its directories are to be made where the test can see them.
            .env("TMPDIR", dir.path())
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(String::from_utf8_lossy(&out.stdout).contains("kernel's floor"));
        assert!(names().is_empty(), "{:?}", names());
    })
    .unwrap();
    let all: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(all["complete"], true);
    let value = |measure: &str, count: &str| {
        let rows = all["rows"].as_array().unwrap();
        let row = rows.iter().find(|r| r["measure"] == measure);
        row.and_then(|r| r["values"][count].as_f64()).unwrap_or_else(|| panic!("{measure} at {count}: {all}"))
    };
    for count in ["6", "9"] {
        assert!(value("kernel's floor", count) > 0.0);
        assert_eq!(value("serial way: slots replayed", count), 2.0);
        let (each, total) =
            (value("serial way: each slot", count), value("serial way: all slots, extrapolated", count));
        let factor: f64 = count.parse().unwrap();
        assert!((total - each / 1000.0 * factor).abs() < 1e-6, "{each} ms a slot, {total} s in all");
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["startup.json"]);
}
