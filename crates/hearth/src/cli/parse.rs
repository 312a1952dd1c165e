//! Values of flags: sizes, durations, variables. Checked here, so that a mistake costs no call.

use hearth_core::block::DiskRate;
use hearth_core::spec::{CPUS, DISK_MIB, MEMORY_MIB, TIMEOUT_SECONDS};

/// `512`, `512M`, `1.5G`, `1T`: MiB. The suffixes are powers of 1024, with or without `i` and `B`.
fn mib(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a size; write MiB as 512 or 512M, or GiB as 1G or 1.5G");
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let unit: u64 = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "m" | "mb" | "mib" => 1,
        "g" | "gb" | "gib" => 1024,
        "t" | "tb" | "tib" => 1024 * 1024,
        _ => return Err(bad()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let whole: u64 = whole.parse().map_err(|_| bad())?;
    if fraction.is_empty() || fraction.len() > 6 {
        return Err(bad());
    }
    let thousandths: u64 = format!("{fraction:0<6}").parse().map_err(|_| bad())?;
    let part = thousandths * unit;
    if !part.is_multiple_of(1_000_000) {
        return Err(format!("{text:?} is not a whole number of MiB"));
    }
    whole.checked_mul(unit).and_then(|n| n.checked_add(part / 1_000_000)).ok_or_else(bad)
}

fn within<T: PartialOrd + std::fmt::Display>(
    value: T,
    range: &std::ops::RangeInclusive<T>,
    unit: &str,
) -> Result<T, String> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(format!("{value}{unit} is outside {}{unit} to {}{unit}", range.start(), range.end()))
}

/// Value of `--memory`, MiB.
pub(super) fn memory(text: &str) -> Result<u64, String> {
    within(mib(text)?, &MEMORY_MIB, " MiB")
}

/// Value of `--disk`, MiB.
pub(super) fn disk(text: &str) -> Result<u64, String> {
    within(mib(text)?, &DISK_MIB, " MiB")
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text:?} is not a whole number"))
}

/// Value of `--disk-bandwidth`, MiB per second.
pub(super) fn disk_bandwidth(text: &str) -> Result<u64, String> {
    within(mib(text)?, &(1..=*DiskRate::MIB_PER_SECOND.end()), " MiB/s")
}

/// Value of `--disk-iops`.
pub(super) fn disk_iops(text: &str) -> Result<u64, String> {
    within(number(text)?, &(1..=*DiskRate::IOPS.end()), "")
}

/// Value of `--disk-burst-ms`.
pub(super) fn disk_burst(text: &str) -> Result<u64, String> {
    within(number(text)?, &(1..=*DiskRate::BURST_MS.end()), " ms")
}

/// Value of `--cpus`.
pub(super) fn cpus(text: &str) -> Result<u32, String> {
    within(text.parse().map_err(|_| format!("{text:?} is not a whole number"))?, &CPUS, "")
}

/// Value of `--timeout`, seconds: `30s`, `5m`, `2h`, `1d`, `1h30m`, or plain seconds.
pub(super) fn timeout(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a duration; write 30s, 5m, 2h, 1d or 1h30m");
    if let Ok(seconds) = text.parse() {
        return within(seconds, &TIMEOUT_SECONDS, " s");
    }
    let (mut total, mut rest) = (0_u64, text);
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest[..end].parse().map_err(|_| bad())?;
        let unit = match rest.as_bytes().get(end) {
            Some(b's') => 1,
            Some(b'm') => 60,
            Some(b'h') => 3600,
            Some(b'd') => 24 * 3600,
            _ => return Err(bad()),
        };
        total = number.checked_mul(unit).and_then(|n| total.checked_add(n)).ok_or_else(bad)?;
        rest = &rest[end + 1..];
    }
    if text.is_empty() {
        return Err(bad());
    }
    within(total, &TIMEOUT_SECONDS, " s")
}

/// Value of `--net`.
pub(super) fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{text:?} is neither on nor off")),
    }
}

/// Value of `--vmm`.
pub(super) fn vmm(text: &str) -> Result<String, String> {
    text.parse::<crate::config::VmmChoice>().map(|choice| choice.to_string())
}

/// Value of `--env`: `NAME=VALUE`, or `NAME` alone for the value it has here.
pub(super) fn env(text: &str) -> Result<(String, String), String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, value.to_owned()),
        None => match std::env::var(text) {
            Ok(value) => (text, value),
            Err(_) => return Err(format!("{text:?} is not set here; write NAME=VALUE")),
        },
    };
    if name.is_empty() {
        return Err(format!("{text:?} has no name; write NAME=VALUE"));
    }
    Ok((name.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_mib_unless_they_say_otherwise() {
        for (text, want) in [
            ("512", 512),
            ("512M", 512),
            ("512MiB", 512),
            ("512mb", 512),
            ("1G", 1024),
            ("1.5g", 1536),
            ("2 GiB", 2048),
        ] {
            assert_eq!(memory(text), Ok(want), "{text}");
        }
        for text in ["", "G", "1X", "-1", "1.5", "1.2.3G", "0x10", "512K", "99999999999999999999", "1.G"] {
            assert!(mib(text).is_err(), "{text} was taken");
        }
        assert_eq!(memory("3").unwrap_err(), "3 MiB is outside 64 MiB to 1048576 MiB");
        assert_eq!(disk("1T"), Ok(1024 * 1024));
    }

    #[test]
    fn durations() {
        for (text, want) in
            [("30s", 30), ("5m", 300), ("2h", 7200), ("1h30m", 5400), ("90", 90), ("1d", 86400)]
        {
            assert_eq!(timeout(text), Ok(want), "{text}");
        }
        for text in ["", "s", "5", "0", "0s", "1w", "5m3", "-1s", "31d", "99999999999999999999s"] {
            assert_eq!(timeout(text).is_err(), text != "5", "{text}");
        }
    }

    #[test]
    fn variables_may_hold_equal_signs() {
        assert_eq!(env("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(env("A="), Ok(("A".into(), String::new())));
        assert!(env("=b").is_err());
        assert!(env("HEARTH_TEST_SURELY_NOT_SET").is_err());
        assert_eq!(cpus("0").unwrap_err(), "0 is outside 1 to 32");
        assert!(cpus("10000").is_err());
    }
}
