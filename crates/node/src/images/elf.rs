//! Just enough of ELF: is this file a kernel, and what does a module's `.modinfo` say. Every offset comes
//! from an untrusted file and is checked against its length before use; nothing is allocated by them.

/// Largest head of a kernel file that is looked at for program headers.
pub(super) const HEAD: usize = 64 * 1024;

const X86_64: u16 = 62;
const TYPE_REL: u16 = 1;
const TYPE_EXEC: u16 = 2;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;

fn bytes<const N: usize>(data: &[u8], at: u64) -> Option<[u8; N]> {
    let at = usize::try_from(at).ok()?;
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

pub(super) fn u16_at(data: &[u8], at: u64) -> Option<u16> {
    bytes(data, at).map(u16::from_le_bytes)
}

pub(super) fn u32_at(data: &[u8], at: u64) -> Option<u32> {
    bytes(data, at).map(u32::from_le_bytes)
}

pub(super) fn u64_at(data: &[u8], at: u64) -> Option<u64> {
    bytes(data, at).map(u64::from_le_bytes)
}

/// Whether the file begins like an ELF.
pub(super) fn is_elf(data: &[u8]) -> bool {
    data.starts_with(b"\x7fELF")
}

/// Checks identification, machine and type.
fn ident(data: &[u8], kind: u16, kind_word: &str) -> Result<(), String> {
    if !is_elf(data) {
        return Err("it is not an ELF file".into());
    }
    let (class, order) = (data.get(4).copied(), data.get(5).copied());
    if class != Some(2) || order != Some(1) {
        return Err("it is not a 64-bit little-endian ELF".into());
    }
    match u16_at(data, 18) {
        Some(X86_64) => {}
        Some(other) => return Err(format!("it is for another machine (ELF machine {other}, x86-64 is 62)")),
        None => return Err("its ELF header is cut short".into()),
    }
    match u16_at(data, 16) {
        Some(t) if t == kind => Ok(()),
        found => Err(format!("its ELF type is {}, not {kind_word}", found.unwrap_or(0))),
    }
}

/// Checks that a file of `file_len` bytes that begins with `head` is an ELF that a VMM can load.
pub(super) fn check_kernel(head: &[u8], file_len: u64) -> Result<(), String> {
    ident(head, TYPE_EXEC, "an executable (2)")?;
    let cut = || "its ELF header is cut short".to_owned();
    let offset = u64_at(head, 32).ok_or_else(cut)?;
    let entry_size = u64::from(u16_at(head, 54).ok_or_else(cut)?);
    let count = u64::from(u16_at(head, 56).ok_or_else(cut)?);
    if entry_size != 56 {
        return Err(format!("its program headers have {entry_size} bytes, not 56"));
    }
    let mut loads = 0;
    for i in 0..count {
        let at = offset.checked_add(i * entry_size).ok_or("its program headers are nowhere")?;
        let field = |off: u64| {
            at.checked_add(off)
                .and_then(|a| u64_at(head, a))
                .ok_or_else(|| "its program headers are cut short or not at its beginning".to_owned())
        };
        let kind = u32_at(head, at).ok_or("its program headers are cut short or not at its beginning")?;
        if kind == PT_INTERP {
            return Err("it is an ordinary program (it names a dynamic loader)".into());
        }
        if kind == PT_LOAD {
            let end = field(8)?.checked_add(field(32)?);
            if end.is_none_or(|end| end > file_len) {
                return Err(format!("it is cut short: segment {i} ends beyond the file's {file_len} bytes"));
            }
            loads += 1;
        }
    }
    if loads == 0 {
        return Err("it has no segment to load".into());
    }
    Ok(())
}

/// What hearth needs of a module's `.modinfo`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ModInfo {
    /// Modules it needs, as its author's build named them.
    pub(super) depends: Vec<String>,
    /// Modules it would like to be loaded before, maybe aliases.
    pub(super) soft: Vec<String>,
    /// First word of `vermagic`: the kernel release.
    pub(super) release: Option<String>,
}

/// Reads the `.modinfo` section of a relocatable object.
pub(super) fn modinfo(data: &[u8]) -> Result<ModInfo, String> {
    ident(data, TYPE_REL, "a relocatable object (1)")?;
    let section = section(data, b".modinfo").ok_or("it has no readable .modinfo section")?;
    let mut info = ModInfo::default();
    for field in section.split(|b| *b == 0) {
        let text = String::from_utf8_lossy(field);
        let Some((key, value)) = text.split_once('=') else { continue };
        match key {
            "depends" => info.depends = value.split(',').filter(|d| !d.is_empty()).map(Into::into).collect(),
            "softdep" => info.soft.extend(before(value)),
            "vermagic" => info.release = value.split_whitespace().next().map(Into::into),
            _ => {}
        }
    }
    Ok(info)
}

/// The `pre:` list of a softdep value such as `pre: a b post: c`.
fn before(value: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut pre = false;
    for word in value.split_whitespace() {
        match word {
            "pre:" => pre = true,
            w if w.ends_with(':') => pre = false,
            w if pre => names.push(w.to_owned()),
            _ => {}
        }
    }
    names
}

fn section<'a>(data: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let table = u64_at(data, 40)?;
    let (size, count) = (u64::from(u16_at(data, 58)?), u64::from(u16_at(data, 60)?));
    let strings = u64::from(u16_at(data, 62)?);
    if size != 64 || strings >= count {
        return None;
    }
    let whole = table.checked_add(count * size)?;
    data.get(..usize::try_from(whole).ok()?)?;
    let header = |i: u64| table.checked_add(i * size);
    let body = |i: u64| -> Option<&'a [u8]> {
        let at = header(i)?;
        let start = u64_at(data, at.checked_add(24)?)?;
        let end = start.checked_add(u64_at(data, at.checked_add(32)?)?)?;
        data.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
    };
    let names = body(strings)?;
    (0..count).find_map(|i| {
        let at = usize::try_from(u32_at(data, header(i)?)?).ok()?;
        let found = names.get(at..)?.split(|b| *b == 0).next()?;
        if found == name { body(i) } else { None }
    })
}

/// The release in a kernel's banner (`Linux version 6.1.0 …`) if `data` holds it.
pub(super) fn banner_release(data: &[u8]) -> Option<String> {
    const BANNER: &[u8] = b"Linux version ";
    let mut rest = data;
    while let Some(at) = rest.windows(BANNER.len()).position(|w| w == BANNER) {
        rest = &rest[at + BANNER.len()..];
        let word: Vec<u8> =
            rest.iter().take(128).copied().take_while(|b| b.is_ascii_graphic() && *b != b'%').collect();
        if word.first().is_some_and(u8::is_ascii_digit) {
            return String::from_utf8(word).ok();
        }
    }
    None
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A small kernel-like ELF: one segment that holds `body`.
    pub(in crate::images) fn kernel_elf(body: &[u8]) -> Vec<u8> {
        let mut e = vec![0; 64 + 56];
        e[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
        e[16..20].copy_from_slice(&[2, 0, 62, 0]);
        e[32] = 64;
        e[54] = 56;
        e[56] = 1;
        e[64] = 1;
        e[64 + 8] = 120;
        e[64 + 32..64 + 40].copy_from_slice(&(body.len() as u64).to_le_bytes());
        e.extend_from_slice(body);
        e
    }

    /// A module-like ELF with the given `.modinfo`.
    pub(in crate::images) fn module_elf(modinfo: &[&str]) -> Vec<u8> {
        let mut e = vec![0; 64];
        e[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
        e[16..20].copy_from_slice(&[1, 0, 62, 0]);
        let names = b"\0.modinfo\0.shstrtab\0";
        let info = modinfo.join("\0");
        let (at_names, at_info) = (64, 64 + names.len());
        e.extend_from_slice(names);
        e.extend_from_slice(info.as_bytes());
        let table = e.len() as u64;
        for (name, start, len) in [(0_u32, 0, 0), (1, at_info, info.len()), (10, at_names, names.len())] {
            let mut h = [0_u8; 64];
            h[..4].copy_from_slice(&name.to_le_bytes());
            h[24..32].copy_from_slice(&(start as u64).to_le_bytes());
            h[32..40].copy_from_slice(&(len as u64).to_le_bytes());
            e.extend_from_slice(&h);
        }
        e[40..48].copy_from_slice(&table.to_le_bytes());
        e[58..64].copy_from_slice(&[64, 0, 3, 0, 2, 0]);
        e
    }

    #[test]
    fn a_kernel_is_told_from_other_files() {
        let good = kernel_elf(b"code");
        let check = |e: &[u8]| check_kernel(e, e.len() as u64);
        assert_eq!(check(&good), Ok(()));
        for len in 0..good.len() {
            assert!(check(&good[..len]).is_err(), "{len} bytes were taken");
        }
        let with = |at: usize, byte: u8| {
            let mut e = good.clone();
            e[at] = byte;
            check(&e).unwrap_err()
        };
        assert!(with(18, 183).contains("another machine"));
        assert!(with(16, 3).contains("ELF type is 3"));
        assert!(with(64, 3).contains("ordinary program"));
        assert!(with(64, 2).contains("no segment"));
        assert!(with(64 + 39, 255).contains("cut short"));
        assert!(with(39, 255).contains("program headers"));
        assert!(check(b"#!/bin/sh\n").unwrap_err().contains("not an ELF"));
    }

    #[test]
    fn modinfo_is_read_and_damage_is_refused() {
        let good = module_elf(&[
            "license=GPL",
            "depends=virtio_ring,virtio",
            "softdep=pre: crc32c post: x",
            "vermagic=6.1.0-9 SMP preempt ",
        ]);
        let info = modinfo(&good).unwrap();
        assert_eq!(info.depends, ["virtio_ring", "virtio"]);
        assert_eq!(info.soft, ["crc32c"]);
        assert_eq!(info.release.as_deref(), Some("6.1.0-9"));
        for len in 0..good.len() {
            assert!(modinfo(&good[..len]).is_err(), "{len} bytes were taken");
        }
        // Any single damaged byte may change the answer but must not panic.
        for at in 0..good.len() {
            for value in [0, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                drop(modinfo(&bad));
            }
        }
        assert_eq!(modinfo(&module_elf(&["depends="])).unwrap(), ModInfo::default());
    }

    #[test]
    fn the_banner_gives_the_release() {
        assert_eq!(
            banner_release(b"x Linux version %s Linux version 6.1.0-a (gcc)").as_deref(),
            Some("6.1.0-a")
        );
        assert_eq!(banner_release(b"Linux version "), None);
    }
}
