//! A real Firecracker with a flat guest made here: 64-bit code that says something on the serial port and
//! halts. It runs on any KVM, a paravirtual one too, on which an ordinary Linux does not boot.

use std::time::{Duration, Instant};

use crate::node::{Node, Wish, cannot, in_path, text};

const SAYS: &str = "hello from a flat guest\r\n";

/// An ELF with one loaded segment at 16 MiB: writes `SAYS` to the first serial port, then halts for ever.
fn flat_kernel() -> Vec<u8> {
    const BASE: u64 = 0x100_0000;
    const HEADERS: usize = 64 + 56;
    let code_len = 4 + 7 + 5 + 6 + 3;
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    code.extend([0x48, 0x8d, 0x35]); // lea rsi, [rip + message]
    code.extend(u32::try_from(code_len - 11).unwrap().to_le_bytes());
    code.push(0xb9); // mov ecx, length
    code.extend(u32::try_from(SAYS.len()).unwrap().to_le_bytes());
    code.extend([0xac, 0xee, 0xff, 0xc9, 0x75, 0xfa]); // lodsb; out dx, al; dec ecx; jnz
    code.extend([0xf4, 0xeb, 0xfd]); // hlt; jmp hlt
    assert_eq!(code.len(), code_len);
    code.extend(SAYS.as_bytes());

    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    elf.extend(2u16.to_le_bytes()); // ET_EXEC
    elf.extend(62u16.to_le_bytes()); // x86-64
    elf.extend(1u32.to_le_bytes());
    elf.extend((BASE + HEADERS as u64).to_le_bytes()); // entry
    elf.extend(64u64.to_le_bytes()); // program headers
    elf.extend(0u64.to_le_bytes());
    elf.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1u32.to_le_bytes()); // PT_LOAD
    elf.extend(5u32.to_le_bytes());
    let size = (HEADERS + code.len()) as u64;
    for word in [0, BASE, BASE, size, size, 0x1000] {
        elf.extend(word.to_le_bytes());
    }
    assert_eq!(elf.len(), HEADERS);
    elf.extend(code);
    elf
}

#[test]
fn a_flat_guest_lives_and_dies_on_firecracker() {
    const NAME: &str = "a_flat_guest_lives_and_dies_on_firecracker";
    if cannot(NAME, false) {
        return;
    }
    if std::env::var_os("HEARTH_FIRECRACKER").is_none() && !in_path("firecracker") {
        hearth_testkit::skip(NAME, "no firecracker in PATH or HEARTH_FIRECRACKER");
        return;
    }
    if !std::path::Path::new("/dev/kvm").exists() {
        hearth_testkit::skip(NAME, "no /dev/kvm");
        return;
    }
    let node = Node::start(&Wish { own_state: true, slot_pool: 0, ..Wish::default() });
    let image = node.dir.path().join("flat.elf");
    std::fs::write(&image, flat_kernel()).unwrap();
    node.ok(&["kernel", "import", "flat", "--image", image.to_str().unwrap()]);
    node.ok(&["template", "create", "flat", "--kernel-only", "--kernel", "flat"]);
    let mut before = None;
    for _ in 0..4 {
        node.ok(&["create", "flat", "--name", "f", "--vmm", "firecracker", "--memory", "128"]);
        let end = Instant::now() + Duration::from_secs(20);
        while !node.ok(&["logs", "f"]).contains(SAYS.trim_end()) {
            assert!(Instant::now() < end, "{}", node.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
        let exec = node.cli(&["exec", "f", "--", "true"]);
        assert_eq!(exec.status.code(), Some(1));
        assert!(text(&exec.stderr).contains("agent"), "{}", text(&exec.stderr));
        assert_eq!(node.inspect("f")["vmm"], "firecracker");
        node.ok(&["rm", "f"]);
        // After the first life the directories that stay with the instance are there.
        let now = node.inventory();
        assert_eq!(before.get_or_insert_with(|| now.clone()), &now);
    }
    hearth_testkit::report(&format!("a real Firecracker ran {NAME}"));
    node.end_clean();
}
