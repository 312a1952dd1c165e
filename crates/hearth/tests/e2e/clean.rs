//! Nothing is left: not after many lives, not after creations that fail at any step.

use crate::node::{Node, Wish, cannot, text};

/// Steps at which a creation can be made to fail, as `hearth serve` knows them.
const STEPS: [&str; 8] = ["record", "run-directory", "nbd", "disk", "slot", "cgroup", "shim", "boot"];

#[test]
fn fifty_lives_leave_the_host_as_it_was() {
    if cannot("fifty_lives_leave_the_host_as_it_was", true) {
        return;
    }
    // No pool: which slots stand ready would differ between two looks.
    let node = Node::start(&Wish { test: "process_vmm = true", slot_pool: 0, ..Wish::default() });
    node.warm_up();
    let before = node.inventory();
    for i in 0..50 {
        let name = format!("s{i}");
        node.ok(&["create", "busybox", "--name", &name, "--vmm", "process", "--disk", "16"]);
        assert_eq!(node.ok(&["exec", &name, "--", "echo", "hi"]), "hi\n");
        node.ok(&["rm", &name]);
    }
    assert_eq!(before, node.inventory());
    node.end_clean();
}

#[test]
fn three_lives_of_real_guests_leave_the_host_as_it_was() {
    if cannot("three_lives_of_real_guests_leave_the_host_as_it_was", true) {
        return;
    }
    let node = Node::start(&Wish { test: "process_vmm = true", slot_pool: 0, ..Wish::default() });
    node.warm_up();
    let before = node.inventory();
    for _ in 0..3 {
        assert_eq!(node.ok(&["run", "busybox", "--", "echo", "hi"]), "hi\n");
    }
    assert_eq!(before, node.inventory());
    node.end_clean();
}

#[test]
fn creations_that_fail_at_any_step_leave_the_host_as_it_was() {
    if cannot("creations_that_fail_at_any_step_leave_the_host_as_it_was", true) {
        return;
    }
    let mut failed = 0;
    for action in ["error", "error-after", "panic"] {
        for step in STEPS {
            let test = format!("process_vmm = true\nfailpoints = \"{step}={action}\"");
            let node = Node::start(&Wish { test: test.leak(), slot_pool: 0, ..Wish::default() });
            // These stay with the instance; a failure at the first step comes before they are made.
            for dir in [node.state.join(&node.instance), node.dir.path().join("r").join(&node.instance)] {
                std::fs::create_dir_all(dir.join("sandboxes")).unwrap();
            }
            let without_cgroup = |inventory: String| -> String {
                let of_instance = format!("/hearth/{}\n", node.instance);
                inventory.split_inclusive('\n').filter(|l| !l.ends_with(&of_instance)).collect()
            };
            let before = without_cgroup(node.inventory());
            let out = node.cli(&["create", "busybox", "--name", "f", "--vmm", "process", "--disk", "16"]);
            assert_eq!(out.status.code(), Some(1), "{step} {action}");
            if action != "panic" {
                assert!(text(&out.stderr).contains(step), "{}", text(&out.stderr));
            }
            let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while !node.list().as_array().unwrap().is_empty() {
                assert!(std::time::Instant::now() < end, "{step} {action}: {}", node.log_text());
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            assert_eq!(before, without_cgroup(node.inventory()), "{step} {action}");
            node.end_clean();
            failed += 1;
        }
    }
    assert!(failed >= 20, "{failed}");
}
