//! The tasks of a process that does not end, and where in the kernel they sleep. Looks only.

use hearth_core::stuck::Holder;

use super::stat;

/// Stack lines kept of one task.
const DEPTH: usize = 16;

/// The tasks that keep a process there: those in a sleep that no signal ends, else its main thread. Empty if it
/// is gone.
#[must_use]
pub fn tasks(pid: u32) -> Vec<Holder> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let ids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
    let all: Vec<Holder> = ids.filter_map(|task| look(pid, task)).collect();
    let asleep: Vec<Holder> = all.iter().filter(|t| t.state == 'D').cloned().collect();
    if asleep.is_empty() { all.into_iter().filter(|t| t.task == pid).collect() } else { asleep }
}

fn look(pid: u32, task: u32) -> Option<Holder> {
    let stat = stat::read(task).ok()?;
    let mut holder = Holder { pid, task, name: stat.comm, state: stat.state, wchan: None, stack: Vec::new() };
    if stat.state == 'D' {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/task/{task}/{file}"));
        // "0": awake by now, or kept from us.
        holder.wchan = read("wchan").ok().filter(|w| !w.is_empty() && w != "0");
        holder.stack = read("stack").map(|text| frames(&text)).unwrap_or_default();
    }
    Some(holder)
}

/// `[<0>] function+0x12/0x34` a line, innermost first.
fn frames(text: &str) -> Vec<String> {
    let function = |line: &str| Some(line.split_once("] ")?.1.trim().to_owned());
    text.lines().filter_map(function).take(DEPTH).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_is_read_as_functions() {
        let text = "[<0>] request_wait_answer+0x1f/0x240\n[<0>] fuse_simple_request+0x19c/0x2e0\n";
        assert_eq!(frames(text), ["request_wait_answer+0x1f/0x240", "fuse_simple_request+0x19c/0x2e0"]);
        assert!(frames("").is_empty());
    }

    #[test]
    fn a_process_that_runs_is_told_by_its_main_thread() {
        let own = tasks(std::process::id());
        // The main thread of a test waits for the others; whichever sleeps deeper is told as well.
        assert!(own.iter().all(|t| t.pid == std::process::id() && !t.name.is_empty()), "{own:?}");
        assert!(!own.is_empty());
        assert!(tasks(u32::MAX).is_empty());
    }
}
