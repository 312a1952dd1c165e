//! A guest of a few bytes, and the Firecracker that runs it.

use std::path::PathBuf;

/// Its greeting.
pub const HELLO: &str = "hello from a flat guest\n";

/// What the guest does after its greeting.
pub enum Then {
    /// Halts, interrupts off: for ever.
    Halt,
    /// Resets the machine through the keyboard controller.
    Reset,
    /// Prints dots as fast as it can.
    Flood,
    /// Prints a dot now and then.
    Tick,
}

/// A 64-bit ELF at 1 MiB that prints the greeting on the first serial port.
pub fn elf(then: &Then) -> Vec<u8> {
    const BASE: u64 = 0x10_0000;
    let tail: &[u8] = match then {
        // hlt; jmp to it
        Then::Halt => &[0xf4, 0xeb, 0xfd],
        // mov al, 0xfe; out 0x64, al; hlt; jmp
        Then::Reset => &[0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd],
        // mov al, '.'; out dx, al; jmp to the out
        Then::Flood => &[0xb0, b'.', 0xee, 0xeb, 0xfd],
        // mov al, '.'; out dx, al; mov ecx, 20000; dec ecx; jnz; jmp to the out
        Then::Tick => &[0xb0, b'.', 0xee, 0xb9, 0x20, 0x4e, 0x00, 0x00, 0xff, 0xc9, 0x75, 0xfc, 0xeb, 0xf4],
    };
    // mov rsi, text; mov dx, 0x3f8; again: lodsb; test al, al; jz end; out dx, al; jmp again
    let mut code = vec![0x48, 0xbe, 0, 0, 0, 0, 0, 0, 0, 0, 0x66, 0xba, 0xf8, 0x03];
    code.extend([0xac, 0x84, 0xc0, 0x74, 0x03, 0xee, 0xeb, 0xf8]);
    code.extend(tail);
    let text = BASE + code.len() as u64;
    code[2..10].copy_from_slice(&text.to_le_bytes());
    code.extend(HELLO.bytes().chain([0]));

    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [BASE, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let size = code.len() as u64;
    file.extend([1, 0, 0, 0, 7, 0, 0, 0]);
    for word in [120, BASE, BASE, size, size, 4096] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

/// A real Firecracker that can run a flat guest here; says why not.
pub fn firecracker() -> Option<PathBuf> {
    let Some(program) = super::program("HEARTH_FIRECRACKER", "firecracker") else {
        super::skipped("no Firecracker: set HEARTH_FIRECRACKER");
        return None;
    };
    if let Err(e) = hearth_host::facts::kvm_usable() {
        super::skipped(&format!("/dev/kvm: {e}"));
        return None;
    }
    Some(program)
}
