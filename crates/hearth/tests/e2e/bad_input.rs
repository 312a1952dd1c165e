//! Bad input: a clear error, the right exit code, and nothing left.

use std::fs;

use crate::node::{Node, Wish, cannot, text};

/// Runs a command that must fail with `code` and say `words`.
fn refused(node: &Node, args: &[&str], code: i32, words: &[&str]) {
    let out = node.cli(args);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{args:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?} does not say {word:?}: {said}");
    }
}

#[test]
fn bad_sandboxes_are_refused() {
    if cannot("bad_sandboxes_are_refused", true) {
        return;
    }
    let node = Node::start(&Wish { test: "process_vmm = true", slot_pool: 0, ..Wish::default() });
    node.warm_up();
    let before = node.inventory();
    let long = "x".repeat(300);
    let with = |option: &'static str, value: &'static str| ["create", "busybox", option, value];
    refused(&node, &["create", "no-such-template"], 1, &["no-such-template"]);
    refused(&node, &with("--cpus", "0"), 2, &["cpus", "1 to 32"]);
    refused(&node, &with("--cpus", "10000"), 2, &["cpus", "1 to 32"]);
    refused(&node, &with("--memory", "3M"), 2, &["memory", "3 MiB"]);
    refused(&node, &with("--disk", "8T"), 1, &["disk"]);
    refused(&node, &with("--name", "a/b"), 2, &["a/b"]);
    refused(&node, &["create", "busybox", "--name", &long], 2, &["300 bytes", "63"]);
    refused(&node, &with("--vmm", "bochs"), 2, &["bochs"]);
    refused(&node, &["exec", "nobody", "--", "true"], 1, &["nobody"]);
    refused(&node, &["run", "busybox"], 2, &["--"]);
    refused(&node, &["rm", "nobody"], 1, &["nobody"]);
    assert_eq!(before, node.inventory());
    node.end_clean();
}

#[test]
fn no_free_slot_says_the_limit() {
    if cannot("no_free_slot_says_the_limit", true) {
        return;
    }
    let node =
        Node::start(&Wish { test: "process_vmm = true", slot_pool: 0, prefix_len: 30, ..Wish::default() });
    node.ok(&["create", "busybox", "--name", "a", "--vmm", "process"]);
    let out = node.cli(&["create", "busybox", "--name", "b", "--vmm", "process"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("no free network slot: the limit is 1"), "{}", text(&out.stderr));
    assert_eq!(node.list().as_array().unwrap().len(), 1);
    node.end_clean();
}

#[test]
fn firecracker_without_kvm_is_refused_with_the_reason() {
    if cannot("firecracker_without_kvm_is_refused_with_the_reason", true) {
        return;
    }
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap();
    if cpu.contains(" vmx") || cpu.contains(" svm") {
        hearth_testkit::skip("firecracker_without_kvm_is_refused_with_the_reason", "KVM works here");
        return;
    }
    // A program that is there, so that what is refused is the missing KVM.
    let env = &[("HEARTH_FIRECRACKER", "/bin/true")];
    let node = Node::start(&Wish { slot_pool: 0, env, ..Wish::default() });
    let why = if std::path::Path::new("/dev/kvm").exists() { "vmx" } else { "/dev/kvm" };
    refused(&node, &["create", "busybox", "--vmm", "firecracker"], 1, &["firecracker", why]);
    node.end_clean();
}

#[test]
fn bad_templates_and_kernels_are_refused() {
    if cannot("bad_templates_and_kernels_are_refused", true) {
        return;
    }
    let node = Node::start(&Wish { own_state: true, slot_pool: 0, ..Wish::default() });
    let dir = node.dir.path();
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    fs::write(path("noise"), vec![7; 1 << 20]).unwrap();
    refused(&node, &["kernel", "import", "k", "--image", &path("noise")], 2, &["not a kernel"]);
    refused(&node, &["kernel", "import", "k", "--image", &path("absent")], 1, &["absent"]);

    // A kernel that passes, so that what follows fails for its own reason.
    let kernels = std::path::PathBuf::from(std::env::var_os("HEARTH_TEST_STATE").unwrap())
        .join("kernels/default/vmlinux");
    node.ok(&["kernel", "import", "default", "--image", kernels.to_str().unwrap()]);
    refused(&node, &["template", "create", "t", "--image", &path("noise")], 2, &["ext4"]);

    let tree = dir.join("tree");
    fs::create_dir_all(tree.join("bin")).unwrap();
    fs::write(tree.join("bin/sh"), vec![1; 100_000]).unwrap();
    let tar = |out: &str, args: &[&str]| {
        let status = std::process::Command::new("tar").arg("-cf").arg(dir.join(out)).args(args).status();
        assert!(status.unwrap().success());
    };
    let tree_arg = tree.to_str().unwrap();
    tar("good.tar", &["-C", tree_arg, "."]);
    let whole = fs::read(path("good.tar")).unwrap();
    fs::write(path("short.tar"), &whole[..whole.len() / 2]).unwrap();
    refused(&node, &["template", "create", "t", "--tar", &path("short.tar")], 2, &["truncated"]);
    tar("dots.tar", &["-C", tree_arg, "-P", "--transform", "s,^bin/sh$,../../escape,", "bin/sh"]);
    refused(&node, &["template", "create", "t", "--tar", &path("dots.tar")], 2, &["escape"]);
    tar("absolute.tar", &["-C", tree_arg, "-P", "--transform", "s,^bin/sh$,/etc/escape,", "bin/sh"]);
    refused(&node, &["template", "create", "t", "--tar", &path("absolute.tar")], 2, &["escape"]);

    // A hard link to a file of the host, and a file written through a link that leads out of the tree.
    std::os::unix::fs::symlink("/etc", tree.join("out")).unwrap();
    fs::hard_link(tree.join("bin/sh"), tree.join("bin/ash")).unwrap();
    tar(
        "link.tar",
        &["-C", tree_arg, "-P", "--transform", "flags=h;s,^bin/ash$,/etc/passwd,", "bin/ash", "bin/sh"],
    );
    refused(&node, &["template", "create", "t", "--tar", &path("link.tar")], 2, &["/etc/passwd"]);
    tar("through.tar", &["-C", tree_arg, "--transform", "flags=r;s,^bin/sh$,out/escape,", "out", "bin/sh"]);
    refused(&node, &["template", "create", "t", "--tar", &path("through.tar")], 2, &["out"]);

    assert_eq!(node.ok(&["template", "ls", "--json"]).trim(), "[]");
    node.ok(&["template", "create", "t", "--tar", &path("good.tar")]);
    node.end_clean();
}
