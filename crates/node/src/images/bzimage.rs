//! Takes the ELF kernel out of a bzImage (Documentation/arch/x86/boot.rst). Firecracker loads only the ELF.

use std::io::Read;

use super::elf::{u16_at, u32_at};
use super::error::ImageError;
use super::job::Job;
use super::mem::{LimitError, read_limited, xz_stream};

/// Largest kernel taken, unpacked. Length fields of a file never allocate more.
pub(super) const MAX_KERNEL: usize = 1 << 30;
const LZ4_LEGACY: u32 = 0x184C_2102;
/// Largest block of the lz4 legacy frame, unpacked.
const LZ4_BLOCK: usize = 8 << 20;

/// Why no kernel came out.
#[derive(Debug)]
pub(super) enum Fault {
    Bad(String),
    Stopped,
}

impl From<&str> for Fault {
    fn from(why: &str) -> Self {
        Fault::Bad(why.to_owned())
    }
}

impl Fault {
    pub(super) fn at(self, path: &std::path::Path) -> ImageError {
        match self {
            Fault::Bad(why) => ImageError::NotAKernel { path: path.to_owned(), why },
            Fault::Stopped => ImageError::Stopped,
        }
    }
}

/// Whether the file has the setup header of a bzImage.
pub(super) fn is_bzimage(data: &[u8]) -> bool {
    data.get(0x202..0x206) == Some(b"HdrS")
}

/// The release the setup header points at.
pub(super) fn release(data: &[u8]) -> Option<String> {
    let at = usize::from(u16_at(data, 0x20e)?);
    if at == 0 {
        return None;
    }
    let text = data.get(0x200 + at..)?;
    let word: Vec<u8> = text.iter().take(256).copied().take_while(u8::is_ascii_graphic).collect();
    String::from_utf8(word).ok().filter(|w| !w.is_empty())
}

/// The compressed kernel.
fn payload(data: &[u8]) -> Result<&[u8], Fault> {
    let cut = "its setup header is cut short";
    let version = u16_at(data, 0x206).ok_or(cut)?;
    if version < 0x0208 {
        return Err(
            "its boot protocol is older than 2.08 (Linux 2.6.26) and does not tell its payload".into()
        );
    }
    let sectors = match data.get(0x1f1) {
        Some(0) => 4,
        Some(n) => usize::from(*n),
        None => return Err(cut.into()),
    };
    let field = |at: u64| u32_at(data, at).and_then(|v| usize::try_from(v).ok()).ok_or(cut);
    let (offset, length) = (field(0x248)?, field(0x24c)?);
    let start = (sectors + 1) * 512 + offset;
    start.checked_add(length).and_then(|end| data.get(start..end)).ok_or_else(|| {
        Fault::Bad(format!("it is cut short: its payload ends at byte {} of {}", start + length, data.len()))
    })
}

/// Unpacks the ELF.
pub(super) fn extract(data: &[u8], job: &Job<'_>) -> Result<Vec<u8>, Fault> {
    let payload = payload(data)?;
    let (body, size) = payload.split_last_chunk::<4>().ok_or("its payload is empty")?;
    // The build appends the unpacked size to every format but gzip, which ends with it anyway.
    let size = usize::try_from(u32::from_le_bytes(*size)).unwrap_or(usize::MAX);
    if size > MAX_KERNEL {
        return Err(Fault::Bad(format!("its payload claims to unpack to {size} bytes")));
    }
    let name;
    let elf = match payload {
        [0x1f, 0x8b, ..] => {
            name = "gzip";
            unpack(flate2::read::GzDecoder::new(payload), job)
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            name = "xz";
            let stream = xz_stream().map_err(Fault::Bad)?;
            unpack(liblzma::read::XzDecoder::new_stream(body, stream), job)
        }
        [0x5d, 0, 0, ..] => {
            name = "lzma";
            let stream = liblzma::stream::Stream::new_lzma_decoder(super::mem::XZ_MEMORY)
                .map_err(|e| Fault::Bad(format!("lzma: {e}")))?;
            unpack(liblzma::read::XzDecoder::new_stream(body, stream), job)
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            name = "zstd";
            let decoder = zstd::stream::read::Decoder::with_buffer(body)
                .map_err(|e| Fault::Bad(format!("zstd: {e}")))?;
            unpack(decoder.single_frame(), job)
        }
        [0x02, 0x21, 0x4c, 0x18, ..] => {
            name = "lz4";
            lz4_legacy(body, size, job)
        }
        [b'B', b'Z', b'h', ..] => return unsupported("bzip2"),
        [0x89, b'L', b'Z', b'O', ..] => return unsupported("lzo"),
        [0x7f, b'E', b'L', b'F', ..] => return Ok(body.to_vec()),
        _ => return Err("its payload is in no known compression".into()),
    }
    .map_err(|fault| match fault {
        Fault::Bad(why) => Fault::Bad(format!("its {name} payload is damaged: {why}")),
        Fault::Stopped => Fault::Stopped,
    })?;
    if elf.len() != size {
        return Err(Fault::Bad(format!("its {name} payload has {} bytes and should have {size}", elf.len())));
    }
    Ok(elf)
}

fn unsupported(name: &str) -> Result<Vec<u8>, Fault> {
    Err(Fault::Bad(format!(
        "its payload is compressed with {name}, which hearth does not read; unpack it with the kernel's \
         scripts/extract-vmlinux first"
    )))
}

fn unpack(reader: impl Read, job: &Job<'_>) -> Result<Vec<u8>, Fault> {
    read_limited(reader, MAX_KERNEL, job).map_err(|e| match e {
        LimitError::Stopped => Fault::Stopped,
        LimitError::Bad(why) => Fault::Bad(why),
    })
}

/// The frame `lz4 -l` writes: magic, then blocks, each with its length in four bytes.
fn lz4_legacy(data: &[u8], size: usize, job: &Job<'_>) -> Result<Vec<u8>, Fault> {
    let mut out = Vec::new();
    let mut block = vec![0; LZ4_BLOCK];
    let mut rest = data;
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        job.check().map_err(|_| Fault::Stopped)?;
        let length = u32::from_le_bytes(*length);
        rest = after;
        if length == LZ4_LEGACY {
            continue;
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let packed = rest.get(..length).ok_or("a block is cut short")?;
        rest = &rest[length..];
        let n = lz4_flex::block::decompress_into(packed, &mut block)
            .map_err(|e| Fault::Bad(format!("lz4: {e}")))?;
        if out.len() + n > size {
            return Err("it holds more than it says".into());
        }
        out.extend_from_slice(&block[..n]);
        job.report("unpacking the kernel", out.len() as u64, Some(size as u64));
    }
    Ok(out)
}

#[cfg(test)]
#[path = "bzimage_tests.rs"]
mod tests;
