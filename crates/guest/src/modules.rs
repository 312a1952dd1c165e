//! Kernel modules of the initramfs: `/modules/order` names one file per line, relative to `/modules`, in the
//! order in which they load. No such file means that the kernel has all it needs.

use std::fs::File;
use std::path::Path;

use rustix::io::Errno;

use crate::say;

const DIR: &str = "/modules";
/// `MODULE_INIT_COMPRESSED_FILE`: the kernel unpacks the file itself.
const COMPRESSED: i32 = 4;

/// Loads all. A module that does not load is named and skipped: whether it was needed shows later, by the
/// device that is missing.
pub(crate) fn load() {
    let Ok(order) = std::fs::read_to_string(Path::new(DIR).join("order")) else { return };
    for line in order.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let path = Path::new(DIR).join(line.trim_start_matches('/'));
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) => {
                say!("module {}: {e}", path.display());
                continue;
            }
        };
        let packed = path.extension().is_some_and(|e| e != "ko");
        let flags = if packed { COMPRESSED } else { 0 };
        match rustix::system::finit_module(&file, c"", flags) {
            // EXIST: loaded or built in. NODEV: its device is not in this machine.
            Ok(()) | Err(Errno::EXIST | Errno::NODEV) => {}
            // The kernel's word for a symbol that no module loaded so far has.
            Err(Errno::NOENT) => say!("module {}: needs a module that must come before it", path.display()),
            Err(e) => say!("module {}: {e}", path.display()),
        }
    }
}
