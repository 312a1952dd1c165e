//! The legacy iptables filter table: same two rules as in `foreign_chains`, by the program, since its interface
//! replaces whole tables. Runs only where that table is loaded.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hearth_core::network::SlotLayout;

use super::error::{Op, Result};

const PROGRAMS: [&str; 3] =
    ["/usr/sbin/iptables-legacy", "/sbin/iptables-legacy", "/usr/local/sbin/iptables-legacy"];
/// `-w 5` bounds the wait for its lock; this bounds everything.
const WITHIN: Duration = Duration::from_secs(15);

/// Adds both rules if the FORWARD chain drops what no rule decided; calls `before` before a change.
pub(crate) fn ensure(op: &Op, layout: &SlotLayout, before: &dyn Fn()) -> Result<()> {
    let Some(program) = loaded(op)? else { return Ok(()) };
    let (tag, interface) = (layout.host_table(), format!("{}+", layout.veth_prefix));
    let listing = run(op, program, &["-S", "FORWARD"])?;
    let tagged = tagged_in(&listing, &tag);
    if !needs_rules(&listing) && tagged.is_empty() {
        return Ok(());
    }
    if tagged.len() == 2 && tagged.iter().all(|t| t.iter().any(|word| *word == interface)) {
        return Ok(());
    }
    before();
    delete(op, program, &tagged)?;
    let conntrack = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"];
    let rest = ["-m", "comment", "--comment", &tag, "-j", "ACCEPT"];
    run(op, program, &[&["-I", "FORWARD", "-o", &interface][..], &conntrack, &rest].concat())?;
    run(op, program, &[&["-I", "FORWARD", "-i", &interface][..], &rest].concat())?;
    tracing::info!("added the rules that let sandbox traffic pass the legacy iptables FORWARD chain");
    Ok(())
}

/// Removes every rule with our tag.
pub(crate) fn release(op: &Op, tag: &str) -> Result<()> {
    let Some(program) = loaded(op)? else { return Ok(()) };
    let listing = run(op, program, &["-S", "FORWARD"])?;
    delete(op, program, &tagged_in(&listing, tag))?;
    match tagged_in(&run(op, program, &["-S", "FORWARD"])?, tag).len() {
        0 => Ok(()),
        n => Err(op.failed(format!("{n} rules are still in the legacy FORWARD chain after their deletion"))),
    }
}

/// Whether the FORWARD chain drops what no rule decided.
pub(crate) fn drops(op: &Op) -> Result<bool> {
    let Some(program) = loaded(op)? else { return Ok(false) };
    Ok(needs_rules(&run(op, program, &["-S", "FORWARD"])?))
}

/// How many rules carry our tag.
pub(crate) fn tagged(op: &Op, tag: &str) -> Result<usize> {
    let Some(program) = loaded(op)? else { return Ok(0) };
    Ok(tagged_in(&run(op, program, &["-S", "FORWARD"])?, tag).len())
}

fn delete(op: &Op, program: &Path, rules: &[Vec<&str>]) -> Result<()> {
    for rule in rules {
        run(op, program, &[&["-D"], &rule[1..]].concat())?;
    }
    Ok(())
}

/// The program, if the filter table is loaded in this namespace.
fn loaded(op: &Op) -> Result<Option<&'static Path>> {
    // `/proc/net` is the main thread's.
    let names = match fs::read_to_string("/proc/thread-self/net/ip_tables_names") {
        Ok(names) => names,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(op.io("read ip_tables_names", e)),
    };
    if !names.lines().any(|l| l == "filter") {
        return Ok(None);
    }
    let program = PROGRAMS.iter().map(Path::new).find(|p| p.exists());
    if program.is_none() {
        tracing::warn!(
            "a legacy iptables filter table is loaded, but there is no iptables-legacy to look into it"
        );
    }
    Ok(program)
}

fn needs_rules(listing: &str) -> bool {
    let last = listing.lines().rfind(|l| l.starts_with("-A FORWARD")).unwrap_or_default();
    let drops_all = ["-A FORWARD -j DROP", "-A FORWARD -j REJECT"].iter().any(|p| last.starts_with(p));
    drops_all || listing.lines().any(|l| l == "-P FORWARD DROP")
}

/// The words of the rules with our tag; ours have no word with a blank in it.
fn tagged_in<'a>(listing: &'a str, tag: &str) -> Vec<Vec<&'a str>> {
    let words = |l: &'a str| l.split_whitespace().map(|w| w.trim_matches('"')).collect::<Vec<_>>();
    let ours = |w: &Vec<&str>| w.first() == Some(&"-A") && w.windows(2).any(|p| p == ["--comment", tag]);
    listing.lines().map(words).filter(ours).collect()
}

fn run(op: &Op, program: &Path, args: &[&str]) -> Result<String> {
    let what = format!("{} -w 5 {}", program.display(), args.join(" "));
    let fail = |e: io::Error| op.io(&what, e);
    let mut child = Command::new(program)
        .args(["-w", "5"])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let deadline = Instant::now() + WITHIN;
    // Read while it runs: a long listing fills the pipe.
    std::thread::scope(|scope| {
        let out = scope.spawn(|| read(stdout.as_mut()));
        let err = scope.spawn(|| read(stderr.as_mut()));
        let status = loop {
            match child.try_wait().map_err(fail)? {
                Some(status) => break status,
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                None => {
                    child.kill().map_err(fail)?;
                    child.wait().map_err(fail)?;
                    return Err(op.deadline(format!("{what} did not end within {WITHIN:?}")));
                }
            }
        };
        let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
        if status.success() { Ok(out) } else { Err(op.failed(format!("{what}: {status}: {}", err.trim()))) }
    })
}

fn read(pipe: Option<&mut impl Read>) -> String {
    let mut bytes = Vec::new();
    match pipe.map(|p| p.read_to_end(&mut bytes)) {
        Some(Err(e)) => format!("(unreadable: {e})"),
        _ => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rules_with_the_whole_tag_are_ours() {
        let listing = "-P FORWARD DROP\n\
            -A FORWARD -i hth+ -m comment --comment hearth-a -j ACCEPT\n\
            -A FORWARD -i hth+ -m comment --comment \"hearth-a\" -j ACCEPT\n\
            -A FORWARD -i xyz+ -m comment --comment hearth-a-2 -j ACCEPT\n\
            -A FORWARD -i xyz+ -m comment --comment \"about hearth-a\" -j ACCEPT\n";
        assert_eq!(tagged_in(listing, "hearth-a").len(), 2);
        assert!(needs_rules(listing));
    }

    #[test]
    fn a_last_rule_that_drops_all_counts_as_a_policy() {
        assert!(needs_rules("-P FORWARD ACCEPT\n-A FORWARD -j REJECT --reject-with icmp-port-unreachable\n"));
        assert!(!needs_rules("-P FORWARD ACCEPT\n-A FORWARD -i eth1 -j DROP\n"));
        assert!(!needs_rules("-P FORWARD ACCEPT\n-A FORWARD -j DROP\n-A FORWARD -i eth1 -j DROP\n"));
    }
}
