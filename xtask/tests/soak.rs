//! A short soak: kills happen, and every count is back afterwards.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use hearth_host::test_support::is_root;

#[test]
fn a_short_soak_with_kills_leaves_nothing() {
    const NAME: &str = "a_short_soak_with_kills_leaves_nothing";
    if !is_root() {
        return hearth_testkit::skip(NAME, "needs root");
    }
    let (Some(state), Some(binary)) = (std::env::var_os("HEARTH_TEST_STATE"), std::env::var_os("HEARTH_BIN"))
    else {
        return hearth_testkit::skip(NAME, "HEARTH_TEST_STATE or HEARTH_BIN is not set: run scripts/test");
    };
    let out = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args([
            "soak",
            "--minutes",
            "0.3",
            "--rate",
            "10",
            "--kill-every",
            "8",
            "--seed",
            "7",
            "--every",
            "5",
        ])
        .arg("--state")
        .arg(state)
        .arg("--binary")
        .arg(binary)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{said}{}", String::from_utf8_lossy(&out.stderr));
    let last = said.lines().find(|line| line.contains("at rest")).unwrap();
    assert!(!last.contains("daemon 0"), "no daemon was killed: {said}");
    hearth_testkit::report(&format!("soak of 18 s:{}", last.split_once(" lives").unwrap().1));
}
