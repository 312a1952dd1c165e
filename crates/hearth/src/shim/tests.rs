//! The shim as a daemon sees it: its socket, with the guest agent as a plain process behind it. Needs the
//! `hearth-guest` program beside this one (or `$HEARTH_GUEST`).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use hearth_api::shim::info_response::State;
use hearth_api::shim::shim_service_client::ShimServiceClient;
use hearth_api::shim::{BootRequest, InfoRequest, StopRequest, WatchRequest};
use hearth_api::v1::exec_input::Input;
use hearth_api::v1::exec_output::Output;
use hearth_api::v1::{ExecInput, ExecOutput, ExecStart, SignalExecRequest, StdinEnd};
use hearth_core::exit::{ExitReason, ExitRecord};
use hearth_core::shim::{SHIM_PROTOCOL, SHIM_SOCKET, SHIM_SPEC_FILE, ShimSpec};
use hearth_core::spec::VmmKind;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use super::{leave_oom_shield, read_spec, serve};

type Client = ShimServiceClient<Channel>;

/// The harness runs each test on a thread of the test's name.
fn this_test() -> String {
    std::thread::current().name().unwrap_or("shim").to_owned()
}

fn guest() -> Option<PathBuf> {
    let named = std::env::var_os("HEARTH_GUEST").map(PathBuf::from);
    let own = std::env::current_exe().ok()?;
    let beside = own.ancestors().skip(1).take(2).map(|d| d.join("hearth-guest"));
    let found = named.into_iter().chain(beside).find(|p| p.is_file());
    if found.is_none() {
        hearth_testkit::skip(&this_test(), "no hearth-guest beside this test: build it, or set HEARTH_GUEST");
    }
    found
}

fn spec(dir: &TempDir, program: PathBuf) -> ShimSpec {
    let spec = ShimSpec {
        protocol: SHIM_PROTOCOL,
        instance: "test".parse().unwrap(),
        id: "abcdefghijkmnpqr".parse().unwrap(),
        name: "box".parse().unwrap(),
        vmm: VmmKind::Process,
        program,
        kernel: PathBuf::new(),
        initramfs: None,
        rootfs: None,
        overlay: None,
        block: None,
        drive_rate: Default::default(),
        cpus: 1,
        memory_mib: 64,
        netns: None,
        net: None,
        agent: true,
        env: vec![],
        ends_at_ms: None,
        run_dir: dir.path().join("run"),
        state_dir: dir.path().join("state"),
        console_cap_bytes: 4096,
        stats_interval_ms: 0,
    };
    std::fs::create_dir_all(&spec.run_dir).unwrap();
    std::fs::create_dir_all(&spec.state_dir).unwrap();
    spec
}

/// A shim on this test's thread, and a client of it.
struct Shim {
    dir: TempDir,
    client: Client,
    server: JoinSet<anyhow::Result<()>>,
}

impl Shim {
    async fn new(agent: bool) -> Option<Self> {
        let dir = tempfile::Builder::new().prefix("hearth-shim-").tempdir().unwrap();
        let spec = ShimSpec { agent, ..spec(&dir, guest()?) };
        let run = spec.run_dir.clone();
        let mut server = JoinSet::new();
        let served = run.clone();
        server.spawn(async move { serve(&served, spec).await });
        let address = format!("unix://{}", run.join(SHIM_SOCKET).display());
        for _ in 0..1000 {
            if let Ok(client) = Client::connect(address.clone()).await {
                return Some(Self { dir, client, server });
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("the shim does not serve: {:?}", server.try_join_next());
    }

    async fn exec(
        &self,
        argv: &[&str],
        stdin: bool,
    ) -> Result<(mpsc::Sender<ExecInput>, Streaming<ExecOutput>), tonic::Status> {
        let (input, messages) = mpsc::channel(2);
        let argv = argv.iter().map(|a| (*a).to_owned()).collect();
        input.send(message(Input::Start(ExecStart { argv, stdin, ..Default::default() }))).await.unwrap();
        let output = self.client.clone().exec(ReceiverStream::new(messages)).await?;
        Ok((input, output.into_inner()))
    }

    async fn stop(mut self, grace_ms: u64) -> ExitRecord {
        let answer =
            self.client.stop(StopRequest { grace_ms, ..Default::default() }).await.unwrap().into_inner();
        let ended = tokio::time::timeout(Duration::from_secs(10), self.server.join_next()).await;
        ended.expect("the shim ends by itself").unwrap().unwrap().unwrap();
        let mut left: Vec<_> =
            std::fs::read_dir(self.dir.path().join("run")).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.retain(|n| !n.to_string_lossy().ends_with(".log"));
        assert!(left.is_empty(), "{left:?}");
        serde_json::from_str(&answer.exit).unwrap()
    }
}

fn message(input: Input) -> ExecInput {
    ExecInput { input: Some(input) }
}

/// Everything a command wrote, and its status.
async fn collect(mut output: Streaming<ExecOutput>) -> Result<(Vec<u8>, i32), tonic::Status> {
    let mut text = Vec::new();
    loop {
        match output.message().await?.and_then(|m| m.output) {
            Some(Output::Stdout(bytes) | Output::Stderr(bytes)) => text.extend(bytes),
            Some(Output::Exit(exit)) => return Ok((text, exit.status)),
            Some(Output::Started(_)) => {}
            None => panic!("the stream ended without an exit"),
        }
    }
}

#[tokio::test]
async fn boot_is_one_boot_and_watchers_see_the_end() {
    let Some(mut shim) = Shim::new(true).await else { return };
    let info = shim.client.info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.state(), info.vmm_pid, info.protocol), (State::Idle, 0, SHIM_PROTOCOL));
    let mut watch = shim.client.watch(WatchRequest {}).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().state(), State::Idle);
    let early = shim.exec(&["true"], false).await.unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition, "{early}");

    let (mut a, mut b) = (shim.client.clone(), shim.client.clone());
    let (one, two) = tokio::join!(a.boot(BootRequest {}), b.boot(BootRequest {}));
    let pid = one.unwrap().into_inner().vmm_pid;
    assert_eq!(pid, two.unwrap().into_inner().vmm_pid);
    let info = shim.client.info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.state(), info.vmm_pid), (State::Running, pid));

    let record = shim.stop(20_000).await;
    assert_eq!((record.reason, record.signal), (ExitReason::Stopped, None));
    let mut last = None;
    while let Some(state) = watch.message().await.unwrap() {
        last = Some(state);
    }
    let last = last.unwrap();
    assert_eq!(last.state(), State::Exited);
    assert_eq!(serde_json::from_str::<ExitRecord>(&last.exit).unwrap(), record);
}

#[tokio::test]
async fn commands_stream_both_ways_and_errors_have_their_codes() {
    let Some(mut shim) = Shim::new(true).await else { return };
    shim.client.boot(BootRequest {}).await.unwrap();
    let (_input, output) = shim.exec(&["sh", "-c", "printf '\\377\\376'; exit 7"], false).await.unwrap();
    assert_eq!(collect(output).await.unwrap(), (vec![0xff, 0xfe], 7));

    let (input, output) = shim.exec(&["cat"], true).await.unwrap();
    let sent: Vec<u8> = (0..4 << 20).map(|n: u32| (n % 251) as u8).collect();
    let feed = async {
        for chunk in sent.chunks(200_000) {
            input.send(message(Input::Stdin(chunk.to_vec()))).await.unwrap();
        }
        input.send(message(Input::StdinEnd(StdinEnd {}))).await.unwrap();
    };
    let ((), read) = tokio::join!(feed, collect(output));
    assert!(read.unwrap() == (sent.clone(), 0), "what went in comes out");

    for (argv, code) in [
        (vec!["no-such-program"], Code::NotFound),
        (vec!["/etc/passwd"], Code::PermissionDenied),
        (vec![], Code::InvalidArgument),
    ] {
        let status = shim.exec(&argv, false).await.unwrap_err();
        assert_eq!(status.code(), code, "{argv:?}: {status}");
    }
    let no_start = tokio_stream::once(message(Input::Stdin(vec![1])));
    let status = shim.client.exec(no_start).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let nobody = SignalExecRequest { exec_id: "x999".into(), signal: 15, ..Default::default() };
    assert_eq!(shim.client.signal_exec(nobody).await.unwrap_err().code(), Code::NotFound);
    shim.stop(0).await;
}

#[tokio::test]
async fn signals_pass_and_a_command_outlives_its_caller() {
    let Some(mut shim) = Shim::new(true).await else { return };
    shim.client.boot(BootRequest {}).await.unwrap();
    let (_input, mut output) = shim.exec(&["sleep", "1000"], true).await.unwrap();
    let Some(Output::Started(started)) = output.message().await.unwrap().unwrap().output else {
        panic!("started comes first")
    };
    let signal = SignalExecRequest { exec_id: started.exec_id, signal: 15, ..Default::default() };
    shim.client.signal_exec(signal).await.unwrap();
    assert_eq!(collect(output).await.unwrap().1, 128 + 15);

    let mark = shim.dir.path().join("mark");
    let script = format!("cat >/dev/null; sleep 0.3; echo done > {}", mark.display());
    let (input, output) = shim.exec(&["sh", "-c", &script], true).await.unwrap();
    drop((input, output));
    let start = Instant::now();
    while !mark.exists() {
        assert!(start.elapsed() < Duration::from_secs(20), "the command goes on with its stdin ended");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    shim.stop(0).await;
}

#[tokio::test]
async fn an_exit_during_a_command_is_unavailable_with_the_reason() {
    let Some(mut shim) = Shim::new(true).await else { return };
    let pid = shim.client.boot(BootRequest {}).await.unwrap().into_inner().vmm_pid;
    let (_input, output) = shim.exec(&["sleep", "1000"], false).await.unwrap();
    let vmm = hearth_host::process::open(&hearth_host::process::identity_of(pid).unwrap()).unwrap();
    let kill = hearth_host::process::Signal::KILL;
    hearth_host::process::signal(std::os::fd::AsFd::as_fd(&vmm), kill).unwrap();
    let status = collect(output).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("sandbox exited: killed"), "{status}");
    shim.server.join_next().await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_guest_without_agent_runs_no_commands() {
    let Some(mut shim) = Shim::new(false).await else { return };
    shim.client.boot(BootRequest {}).await.unwrap();
    let status = shim.exec(&["true"], false).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(status.message(), "template has no guest agent");
    shim.stop(0).await;
}

/// Set in the process that runs one test alone.
const ALONE: &str = "HEARTH_TEST_ALONE";

/// Memory is measured per process, so this test runs again in one of its own.
#[test]
fn much_output_and_a_slow_reader_cost_no_memory() {
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(much_output());
    }
    let name = this_test();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture"])
        .env(ALONE, "1")
        .status();
    assert!(status.unwrap().success());
}

async fn much_output() {
    const BYTES: usize = 256 << 20;
    let Some(mut shim) = Shim::new(true).await else { return };
    shim.client.boot(BootRequest {}).await.unwrap();
    let (_input, mut output) =
        shim.exec(&["head", "-c", &BYTES.to_string(), "/dev/zero"], false).await.unwrap();
    let (mut read, mut most, mut before) = (0, 0, 0);
    let start = Instant::now();
    while let Some(message) = output.next().await {
        match message.unwrap().output {
            Some(Output::Stdout(bytes)) => {
                assert!(bytes.len() <= 64 * 1024);
                if read == 0 {
                    // The pipes fill up while nobody reads.
                    before = resident_kib();
                    tokio::time::sleep(Duration::from_millis(300)).await;
                }
                if read / (64 << 20) != (read + bytes.len()) / (64 << 20) {
                    most = most.max(resident_kib());
                }
                read += bytes.len();
            }
            Some(Output::Exit(exit)) => assert_eq!(exit.status, 0),
            _ => {}
        }
    }
    assert_eq!(read, BYTES);
    let grown = most.saturating_sub(before);
    println!(
        "MEASURED: {BYTES} bytes in {:?}, grown by {grown} KiB (client and shim together)",
        start.elapsed()
    );
    assert!(grown < 16 * 1024, "grown by {grown} KiB");
    shim.stop(0).await;
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_newer_protocol_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(SHIM_SPEC_FILE);
    std::fs::write(&path, r#"{"protocol": 99, "something": "new"}"#).unwrap();
    let error = read_spec(dir.path()).unwrap_err().to_string();
    assert!(error.contains("protocol 99") && error.contains("same release"), "{error}");
    std::fs::write(&path, "{}").unwrap();
    assert!(read_spec(dir.path()).is_err());
    let good = spec(&dir, "/bin/true".into());
    std::fs::write(&path, serde_json::to_vec(&good).unwrap()).unwrap();
    assert_eq!(read_spec(dir.path()).unwrap(), good);
}

#[tokio::test]
async fn a_living_shims_socket_is_not_taken_and_a_stale_one_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(SHIM_SOCKET);
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let listener = super::bind(&path).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    assert!(super::bind(&path).unwrap_err().to_string().contains("somebody else serves"));
    drop(listener);
}

#[test]
fn only_a_shield_from_the_oom_killer_is_taken_off() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("oom_score_adj");
    for (before, after) in [("-500\n", "0"), ("0\n", "0\n"), ("300\n", "300\n")] {
        std::fs::write(&file, before).unwrap();
        leave_oom_shield(&file).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), after);
    }
}
