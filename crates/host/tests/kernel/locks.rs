//! The instance lock between processes.

use hearth_host::lock::{InstanceLock, LockError, is_held};

use crate::helper;

#[test]
fn a_lock_held_by_another_process_names_its_pid_and_dies_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let (run, said) = (dir.path().join("run"), dir.path().join("answer"));
    let mut holder = helper::start("lock", &said);
    assert_eq!(helper::answer(&said), "held");
    let error = InstanceLock::acquire(&run).unwrap_err();
    assert!(matches!(&error, LockError::Held { holder: Some(pid), .. } if *pid == holder.id()), "{error}");
    assert!(error.to_string().contains(&format!("pid {}", holder.id())), "{error}");
    assert!(is_held(&run).unwrap());
    // Its text lies: the kernel's own list of locks still names the holder.
    std::fs::write(run.join("lock"), "1 1 x\n").unwrap();
    let error = InstanceLock::acquire(&run).unwrap_err();
    assert!(error.to_string().contains(&format!("pid {}", holder.id())), "{error}");
    holder.kill().unwrap();
    holder.wait().unwrap();
    InstanceLock::acquire(&run).unwrap().remove().unwrap();
    assert!(!run.exists());
}
