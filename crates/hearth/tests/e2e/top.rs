//! `hearth top` itself, in a terminal made by script(1), against a real daemon.

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::node::{Node, Wish, cannot, in_path};

/// A program in a terminal of 80 by 24.
struct Terminal {
    child: Child,
    /// All it wrote so far.
    written: Arc<Mutex<Vec<u8>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Terminal {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script starts");
        let mut out = child.stdout.take().expect("its stdout is ours");
        let written = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&written);
        let reader = std::thread::spawn(move || {
            let mut some = [0; 4096];
            while let Ok(n) = out.read(&mut some) {
                if n == 0 {
                    return;
                }
                into.lock().expect("nobody panicked with it").extend_from_slice(&some[..n]);
            }
        });
        Self { child, written, reader: Some(reader) }
    }

    fn keys(&mut self, keys: &str) {
        let stdin = self.child.stdin.as_mut().expect("its stdin is ours");
        stdin.write_all(keys.as_bytes()).and_then(|()| stdin.flush()).expect("it reads");
    }

    /// What is on the screen.
    fn text(&self) -> String {
        let bytes = self.written.lock().expect("nobody panicked with it").clone();
        drawn(&String::from_utf8_lossy(&bytes))
    }

    fn wait_for(&self, word: &str) {
        let end = Instant::now() + Duration::from_secs(60);
        while !self.text().contains(word) {
            assert!(Instant::now() < end, "no {word:?}: {}", self.text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The pid of what runs in it.
    fn top(&self) -> String {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        std::fs::read_to_string(children).expect("script lives").trim().to_owned()
    }

    /// Its exit code, and every byte it wrote.
    fn end(mut self) -> (Option<i32>, String) {
        let end = Instant::now() + Duration::from_secs(60);
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                break status;
            }
            assert!(Instant::now() < end, "it does not end: {}", self.text());
            std::thread::sleep(Duration::from_millis(50));
        };
        self.reader.take().expect("it is joined once").join().expect("it does not panic");
        let bytes = self.written.lock().expect("nobody panicked with it").clone();
        (status.code(), String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Only after a failed assertion.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The screen after all these bytes, as lines: only what changed is drawn, each part at its place.
fn drawn(text: &str) -> String {
    let mut screen = vec![vec![' '; 80]; 24];
    let (mut row, mut column, mut chars) = (0, 0, text.chars().peekable());
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            if chars.next_if_eq(&'[').is_none() {
                continue;
            }
            let mut order = String::new();
            while let Some(c) = chars.next_if(|c| !c.is_ascii_alphabetic()) {
                order.push(c);
            }
            match chars.next() {
                Some('H') => {
                    let (r, c) = order.split_once(';').unwrap_or(("1", "1"));
                    (row, column) =
                        (r.parse::<usize>().unwrap_or(1) - 1, c.parse::<usize>().unwrap_or(1) - 1);
                }
                Some('J') => screen = vec![vec![' '; 80]; 24],
                _ => {}
            }
        } else if let Some(cell) = screen.get_mut(row).and_then(|line| line.get_mut(column)) {
            *cell = c;
            column += 1;
        }
    }
    screen.into_iter().map(|line| format!("{}\n", line.into_iter().collect::<String>().trim_end())).collect()
}

fn top(node: &Node) -> Command {
    let hearth = crate::node::hearth();
    let line = format!("stty rows 24 cols 80; exec {} top", hearth.display());
    let mut command = node.netns.command("script");
    command.args(["-qfec", &line, "/dev/null"]).env("TERM", "xterm").env("NO_COLOR", "1");
    command.env_remove("HEARTH_ADDR");
    command
}

const WISH: Wish = Wish {
    test: "process_vmm = true",
    slot_pool: 1,
    prefix_len: 24,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

#[test]
fn top_shows_a_sandbox_deletes_it_and_gives_the_terminal_back() {
    let test = "top_shows_a_sandbox_deletes_it_and_gives_the_terminal_back";
    if cannot(test, true) {
        return;
    }
    if !in_path("script") {
        hearth_testkit::skip(test, "script is not in PATH");
        return;
    }
    let mut node = Node::start(&WISH);
    for name in ["web-stays", "web-goes"] {
        node.ok(&["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]);
    }
    let mut terminal = Terminal::start(top(&node));
    terminal.wait_for("web-stays");
    for word in [&*node.instance, "healthy", "2 live", "of 127", "Leaked", "Reclaim", "load "] {
        terminal.wait_for(word);
    }
    terminal.keys("/goes\r");
    terminal.wait_for("1 of 2");
    terminal.keys("\r");
    terminal.wait_for("Owns");
    terminal.keys("d");
    terminal.wait_for("Delete web-goes and everything it owns?");
    terminal.keys("y");
    terminal.wait_for("web-goes is deleted");
    let left = node.list();
    let names: Vec<&str> = left.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["web-stays"]);
    // The daemon goes and comes back meanwhile.
    node.kill_daemon();
    terminal.wait_for("no answer for");
    node.start_daemon();
    terminal.keys("\u{1b}");
    terminal.wait_for("1 of 1");
    terminal.keys("q");
    let (code, all) = terminal.end();
    assert_eq!(code, Some(0), "{all}");
    assert!(all.contains("\u{1b}[?1049h"), "no screen of its own");
    assert!(all.trim_end().ends_with("\u{1b}[?1049l\u{1b}[?25h"), "the terminal is not given back: {all:?}");
    let coloured = ["\u{1b}[38;5", "\u{1b}[31m", "\u{1b}[32m", "\u{1b}[33m"].iter().any(|c| all.contains(c));
    assert!(!coloured, "colour in spite of NO_COLOR");

    // A signal gives it back too.
    let terminal = Terminal::start(top(&node));
    terminal.wait_for("web-stays");
    let pid = terminal.top();
    assert!(Command::new("kill").arg(&pid).status().unwrap().success(), "{pid:?}");
    let (code, all) = terminal.end();
    assert_eq!(code, Some(0), "{all}");
    assert!(all.contains("\u{1b}[?1049l\u{1b}[?25h"), "the terminal is not given back: {all:?}");

    // A terminal that hangs up, as a lost connection does, ends it.
    let mut terminal = Terminal::start(top(&node));
    terminal.wait_for("web-stays");
    let pid = terminal.top();
    terminal.child.kill().unwrap();
    terminal.child.wait().unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while std::fs::exists(format!("/proc/{pid}")).unwrap() {
        assert!(Instant::now() < end, "process {pid} lives on without a terminal");
        std::thread::sleep(Duration::from_millis(50));
    }
    node.ok(&["rm", "web-stays"]);
    node.end_clean();
}
