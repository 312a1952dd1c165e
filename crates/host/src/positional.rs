//! Reads, holes, zeroes and locks at a position of a file, for the block server: what the standard library lacks. None
//! of these moves a position that somebody else could use.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use bytes::BytesMut;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate};
use rustix::io::Errno;

/// Appends up to `len` bytes from `at` to `buf`, and says how many: fewer only at the end of the file.
///
/// # Errors
/// From pread(2); what was read before is in `buf`.
pub fn read(file: &File, buf: &mut BytesMut, len: usize, at: u64) -> io::Result<usize> {
    buf.reserve(len);
    let mut done = 0;
    while done < len {
        let room = &mut buf.spare_capacity_mut()[..len - done];
        let got = match rustix::io::pread(file, room, at + done as u64) {
            Ok((read, _)) => read.len(),
            Err(Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        };
        if got == 0 {
            break;
        }
        // SAFETY: the kernel has filled `got` bytes right behind the length, all within the capacity.
        unsafe { buf.set_len(buf.len() + got) };
        done += got;
    }
    Ok(done)
}

/// Takes the lock on one byte of a file, which need not be there, without waiting; false: somebody has it. It belongs to
/// this opening of the file and goes with its last descriptor, also from a process that dies: `F_OFD_SETLK`, fcntl(2).
///
/// # Errors
/// From fcntl(2).
pub fn try_lock_byte(file: &File, at: u64) -> io::Result<bool> {
    let whence = i16::try_from(libc::SEEK_SET).map_err(io::Error::other)?;
    let kind = i16::try_from(libc::F_WRLCK).map_err(io::Error::other)?;
    let start = libc::off_t::try_from(at).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    // A pid of 0 is demanded.
    let lock = libc::flock { l_type: kind, l_whence: whence, l_start: start, l_len: 1, l_pid: 0 };
    // SAFETY: the lock is whole and outlives the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

/// Like [`read`], but only what is in the page cache, without waiting for a disk; so it may be called where nothing may
/// block. Fewer bytes than asked for, or none, say nothing about the end of the file.
///
/// # Errors
/// From preadv2(2) with `RWF_NOWAIT`. That it would have to wait, or that the file system does not know this kind of
/// read, is no error but zero bytes.
pub fn read_cached(file: &File, buf: &mut BytesMut, len: usize, at: u64) -> io::Result<usize> {
    buf.reserve(len);
    let room = &mut buf.spare_capacity_mut()[..len];
    let part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: len };
    let Ok(at) = libc::off_t::try_from(at) else { return Ok(0) };
    // SAFETY: one buffer of `len` bytes that are ours and writable; the call keeps no pointer.
    let got = unsafe { libc::preadv2(file.as_fd().as_raw_fd(), &raw const part, 1, at, libc::RWF_NOWAIT) };
    let Ok(got) = usize::try_from(got) else {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINTR | libc::EINVAL) => Ok(0),
            _ => Err(error),
        };
    };
    // SAFETY: as in `read`.
    unsafe { buf.set_len(buf.len() + got) };
    Ok(got)
}

/// Makes a hole, which reads as zeroes; the length of the file stays. False: the file system has no holes.
///
/// # Errors
/// From fallocate(2).
pub fn punch(file: &File, at: u64, len: u64) -> io::Result<bool> {
    allocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)
}

/// Makes a range read as zeroes and keeps it allocated, without writing it. False: the file system cannot.
///
/// # Errors
/// From fallocate(2).
pub fn zero(file: &File, at: u64, len: u64) -> io::Result<bool> {
    allocate(file, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, at, len)
}

fn allocate(file: &File, how: FallocateFlags, at: u64, len: u64) -> io::Result<bool> {
    loop {
        return match fallocate(file, how, at, len) {
            Ok(()) => Ok(true),
            Err(Errno::INTR) => continue,
            // The last is what a block device answers where it cannot.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV) => Ok(false),
            Err(e) => Err(e.into()),
        };
    }
}

/// The first data at or after `at`: where it begins and ends. `None`: only a hole until the end. A file system
/// without holes answers that all is data.
///
/// # Errors
/// From lseek(2).
pub fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    let begin = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(begin) => begin,
        Err(Errno::NXIO) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    match rustix::fs::seek(file, SeekFrom::Hole(begin)) {
        Ok(end) => Ok(Some((begin, end))),
        // It was made a hole since.
        Err(Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    fn file(len: u64) -> File {
        let file = tempfile::tempfile().expect("temporary file");
        file.set_len(len).expect("length");
        file
    }

    #[test]
    fn reads_append_and_end_with_the_file() {
        let file = file(10_000);
        file.write_all_at(b"abc", 9_000).unwrap();
        let mut buf = BytesMut::from(&b"x"[..]);
        assert_eq!(read(&file, &mut buf, 3, 9_000).unwrap(), 3);
        assert_eq!(&buf[..], b"xabc");
        assert_eq!(read(&file, &mut buf, 3, 9_999).unwrap(), 1);
        assert_eq!(&buf[..], b"xabc\0");
        assert_eq!(read(&file, &mut buf, 3, 10_000).unwrap(), 0);
        assert!(read_cached(&file, &mut buf, 3, u64::MAX).unwrap() == 0 && buf.len() == 5);
        let mut cached = BytesMut::new();
        // What was just written is in the cache, where the file system tells.
        let got = read_cached(&file, &mut cached, 3, 9_000).unwrap();
        assert_eq!(&cached[..], &b"abc"[..got]);
    }

    #[test]
    fn holes_and_zeroes_read_as_zeroes_and_keep_the_length() {
        let file = file(0);
        file.write_all_at(&[7; 1 << 20], 0).unwrap();
        if punch(&file, 0, 256 << 10).unwrap() {
            let (begin, end) = next_data(&file, 0).unwrap().unwrap();
            assert!(begin <= 256 << 10 && end == 1 << 20, "{begin}..{end}");
        }
        if zero(&file, 512 << 10, 4096).unwrap() {
            let mut buf = BytesMut::new();
            read(&file, &mut buf, 4097, 512 << 10).unwrap();
            assert!(buf[..4096].iter().all(|b| *b == 0) && buf[4096] == 7);
        }
        assert_eq!(file.metadata().unwrap().size(), 1 << 20);
        assert_eq!(next_data(&file, 1 << 20).unwrap(), None);
        assert!(punch(&file, 0, 0).is_err(), "an error of the kernel is told");
    }

    #[test]
    fn the_lock_on_a_byte_is_one_openings_and_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("locks");
        let open =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (one, two) = (open(), open());
        assert!(try_lock_byte(&one, 5).unwrap() && try_lock_byte(&one, 5).unwrap());
        assert!(!try_lock_byte(&two, 5).unwrap());
        assert!(try_lock_byte(&two, 6).unwrap() && try_lock_byte(&two, (1 << 62) + 5).unwrap());
        let copy = one.try_clone().unwrap();
        drop(one);
        assert!(!try_lock_byte(&two, 5).unwrap());
        drop(copy);
        assert!(try_lock_byte(&two, 5).unwrap());
        assert_eq!(try_lock_byte(&two, u64::MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
