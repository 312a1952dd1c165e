//! One line of Firecracker's metrics (its `docs/metrics.md`): a JSON object. Counters hold what was added since the
//! line before, so they are summed here, and a line that is lost is missing for ever.

use hearth_core::usage::{DiskCounters, NetCounters, VmmSample};
use serde::Deserialize;

/// A line that is no metrics.
#[derive(Debug, thiserror::Error)]
#[error("a line of {bytes} bytes is no metrics")]
pub struct NotMetrics {
    /// Its length.
    bytes: usize,
    /// Why.
    #[source]
    source: serde_json::Error,
}

#[derive(Debug, Deserialize)]
struct Line {
    #[allow(dead_code, reason = "its presence tells metrics from any other object")]
    utc_timestamp_ms: u64,
    #[serde(default)]
    block: Block,
    #[serde(default)]
    net: Net,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Block {
    read_bytes: u64,
    write_bytes: u64,
    read_count: u64,
    write_count: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Net {
    rx_bytes_count: u64,
    tx_bytes_count: u64,
    rx_packets_count: u64,
    tx_packets_count: u64,
}

/// Adds a line that came at `now_ms` (milliseconds since the Unix epoch).
///
/// # Errors
/// If it is not a line of metrics; the sums stay as they are.
pub fn add(sums: &mut VmmSample, line: &[u8], now_ms: u64) -> Result<(), NotMetrics> {
    let line: Line =
        serde_json::from_slice(line).map_err(|source| NotMetrics { bytes: line.len(), source })?;
    let DiskCounters { read_bytes, written_bytes, reads, writes } = &mut sums.disk;
    let mut net = sums.net.unwrap_or_default();
    let NetCounters { received_bytes, sent_bytes, received_packets, sent_packets } = &mut net;
    for (sum, more) in [
        (read_bytes, line.block.read_bytes),
        (written_bytes, line.block.write_bytes),
        (reads, line.block.read_count),
        (writes, line.block.write_count),
        (received_bytes, line.net.rx_bytes_count),
        (sent_bytes, line.net.tx_bytes_count),
        (received_packets, line.net.rx_packets_count),
        (sent_packets, line.net.tx_packets_count),
    ] {
        // The guest can make these as large as it likes.
        *sum = sum.saturating_add(more);
    }
    sums.net = Some(net);
    sums.samples += 1;
    sums.at_ms = now_ms;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_added_up_and_others_change_nothing() {
        let mut sums = VmmSample::default();
        let line = br#"{"utc_timestamp_ms":1,"block":{"read_bytes":512,"read_count":1,"flush_count":9},"net":{"tx_bytes_count":7},"vmm":{}}"#;
        add(&mut sums, line, 10).unwrap();
        add(&mut sums, line, 20).unwrap();
        assert_eq!((sums.samples, sums.at_ms), (2, 20));
        assert_eq!((sums.disk.read_bytes, sums.disk.reads), (1024, 2));
        assert_eq!(sums.net.unwrap().sent_bytes, 14);
        let before = sums;
        for other in [&b"{}"[..], b"", b"{\"utc_timestamp_ms\":1", b"7", b"\xff"] {
            add(&mut sums, other, 30).unwrap_err();
        }
        assert_eq!(sums, before);
        let huge = br#"{"utc_timestamp_ms":1,"block":{"read_bytes":18446744073709551615}}"#;
        add(&mut sums, huge, 40).unwrap();
        assert_eq!(sums.disk.read_bytes, u64::MAX);
    }
}
