//! Decompression with bounds: of memory for what is unpacked into it, of dictionaries for what streams.

use std::io::{BufRead, Read};

use super::job::Job;

/// Memory an xz or lzma stream may ask for: the largest preset needs 65 MiB, kernels up to 128.
pub(super) const XZ_MEMORY: u64 = 256 << 20;

/// Why nothing was read.
#[derive(Debug)]
pub(super) enum LimitError {
    Bad(String),
    Stopped,
}

/// Reads all of `reader`, at most `limit` bytes.
pub(super) fn read_limited(
    mut reader: impl Read,
    limit: usize,
    job: &Job<'_>,
) -> Result<Vec<u8>, LimitError> {
    let mut out = Vec::new();
    let mut buf = vec![0; 256 * 1024];
    loop {
        job.check().map_err(|_| LimitError::Stopped)?;
        match reader.read(&mut buf) {
            Ok(0) => return Ok(out),
            Ok(n) if out.len() + n > limit => {
                return Err(LimitError::Bad(format!("it unpacks to more than {limit} bytes")));
            }
            Ok(n) => out.extend_from_slice(&buf[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(LimitError::Bad(e.to_string())),
        }
    }
}

/// A decoder of one xz stream with bounded memory.
pub(super) fn xz_stream() -> Result<liblzma::stream::Stream, String> {
    liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, 0).map_err(|e| format!("xz: {e}"))
}

/// Unpacks gzip, xz and zstd as told by the first bytes; anything else passes as it is.
pub(super) fn decoder<'a>(mut reader: impl BufRead + 'a) -> std::io::Result<Box<dyn Read + 'a>> {
    let head = reader.fill_buf()?;
    Ok(match head {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(reader)),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            let flags = liblzma::stream::CONCATENATED;
            let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, flags)
                .map_err(|e| std::io::Error::other(format!("xz: {e}")))?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(reader, stream))
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(zstd::stream::read::Decoder::with_buffer(reader)?),
        _ => Box::new(reader),
    })
}
