//! A root disk that stays in a store, with real guests: it boots, many share what was fetched, and what cannot be had is told.

use std::fs;
use std::sync::Arc;

use hearth_host::net::netns;
use serde_json::Value;

use crate::node::{Node, Wish, cannot, text};
use crate::store::Store;
use crate::traps::until;

/// A template whose root disk is a server's; gone from the shared state directory with this.
struct Remote<'a> {
    node: &'a Node,
    name: String,
    store: Store,
}

impl<'a> Remote<'a> {
    fn new(node: &'a Node) -> Self {
        let busybox = node.state.join("templates/busybox");
        let made: Value = serde_json::from_slice(&fs::read(busybox.join("template.json")).unwrap()).unwrap();
        let image = fs::read(busybox.join("rootfs.ext4")).unwrap();
        let store = netns::enter(&node.netns.path(), || Ok(Store::of(image))).unwrap();
        let name = format!("remote-{}", node.instance);
        let kernel = made["kernel"].as_str().unwrap();
        node.ok(&["template", "create", &name, "--remote", &store.url(), "--kernel", kernel]);
        Self { node, name, store }
    }

    fn create(&self, name: &str) {
        self.node.ok(&["create", &self.name, "--name", name, "--vmm", "qemu", "--disk", "64"]);
    }

    /// What was counted of the root disk.
    fn counted(&self, name: &str) -> Value {
        let disks = self.node.inspect(name)["disks"].clone();
        let all = disks.as_array().unwrap();
        all.iter().find(|d| d["disk"] == "rootfs").unwrap()["remote"].clone()
    }
}

impl Drop for Remote<'_> {
    fn drop(&mut self) {
        self.node.cli(&["template", "rm", &self.name]);
    }
}

#[test]
fn guests_run_from_a_root_disk_that_stays_in_a_store() {
    if cannot("guests_run_from_a_root_disk_that_stays_in_a_store", true) {
        return;
    }
    let node = Node::start(&Wish { slot_pool: 2, ..Wish::default() });
    let remote = Remote::new(&node);
    // Their caches are this test's alone: the address is, and it is part of a chunk's name.
    remote.create("first");
    let said =
        node.ok(&["exec", "first", "--", "sh", "-c", "cat /bin/busybox | md5sum; echo written > /f; cat /f"]);
    assert!(said.ends_with("written\n"), "{said}");
    let first = remote.counted("first");
    assert!(first["fetches"].as_u64().unwrap() > 0 && first["uncached"] == 0, "{first}");
    // The second has what the first has read.
    let asked = remote.store.asked();
    remote.create("second");
    assert_eq!(
        node.ok(&["exec", "second", "--", "sh", "-c", "cat /bin/busybox | md5sum; echo written"]),
        said
    );
    let second = remote.counted("second");
    assert!(second["hits"].as_u64().unwrap() > 0, "{second}");
    assert!(remote.store.asked() <= asked + 1, "{} after {asked}: {second}", remote.store.asked());
    let refused = node.cli(&["create", &remote.name, "--name", "fc", "--vmm", "firecracker"]);
    assert!(!refused.status.success());
    node.ok(&["rm", "first", "second"]);
    // Another version under the same address is not what the template was made of.
    remote.store.replace(vec![0; 1 << 20], "\"other\"");
    let changed = node.cli(&["create", &remote.name, "--name", "third", "--vmm", "qemu"]);
    let said = text(&changed.stderr);
    assert!(!changed.status.success() && said.contains("no longer what the template was made of"), "{said}");
    until(&node, "released", || node.list().as_array().unwrap().is_empty());
    drop(remote);
    node.end_clean();
}

#[test]
fn what_is_no_ext4_image_or_not_there_makes_no_template() {
    if cannot("what_is_no_ext4_image_or_not_there_makes_no_template", true) {
        return;
    }
    let node = Node::new(&Wish { own_state: true, ..Wish::default() });
    let store = Arc::new(netns::enter(&node.netns.path(), || Ok(Store::of(vec![7; 1 << 20]))).unwrap());
    for (url, word) in [
        (store.url(), "no ext4 image"),
        (store.url().replace("disk.img", "other"), "404"),
        ("https://me:secret@host/disk".to_owned(), "environment"),
    ] {
        let out = node.cli(&["template", "create", "t", "--remote", &url]);
        let said = text(&out.stderr);
        assert!(!out.status.success() && said.contains(word) && !said.contains("secret"), "{said}");
    }
}
