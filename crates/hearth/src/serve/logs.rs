//! Reads a console log, and goes on reading as it grows and is turned over.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_api::v1::LogsChunk;
use hearth_node::View;
use tokio::fs::File;
use tokio::io::AsyncReadExt as _;
use tokio::sync::{mpsc, watch};
use tonic::Status;

/// How often a followed log is looked at. The writer is another process and may not depend on its readers.
const LOOK: Duration = Duration::from_millis(100);
const CHUNK: usize = 64 * 1024;

/// Sends what is in the log, the older part first; with `follow` also what comes, until the sandbox is gone
/// or nobody listens.
pub(crate) async fn follow(
    path: PathBuf,
    view: watch::Receiver<View>,
    follow: bool,
    out: mpsc::Sender<Result<LogsChunk, Status>>,
) {
    if let Err(e) = try_follow(&path, view, follow, &out).await {
        // Nobody may be listening any more.
        drop(out.send(Err(Status::internal(format!("{}: {e}", path.display())))).await);
    }
}

async fn try_follow(
    path: &Path,
    view: watch::Receiver<View>,
    follow: bool,
    out: &mpsc::Sender<Result<LogsChunk, Status>>,
) -> io::Result<()> {
    let mut older = path.as_os_str().to_owned();
    older.push(".1");
    if let Some(mut file) = open(Path::new(&older)).await? {
        copy(&mut file, out).await?;
    }
    let mut current = open(path).await?;
    loop {
        // Asked before reading: what is written before the end is then still read.
        let gone = view.borrow().gone || view.has_changed().is_err();
        match &mut current {
            Some(file) => copy(file, out).await?,
            None => current = open(path).await?,
        }
        if !follow || gone || out.is_closed() {
            return Ok(());
        }
        if let Some(file) = &mut current
            && turned_over(file, path).await?
        {
            copy(file, out).await?;
            current = open(path).await?;
            continue;
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = out.closed() => return Ok(()),
        }
    }
}

async fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path).await {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

async fn turned_over(file: &File, path: &Path) -> io::Result<bool> {
    let there = match tokio::fs::metadata(path).await {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    let here = file.metadata().await?;
    Ok((here.dev(), here.ino()) != (there.dev(), there.ino()))
}

async fn copy(file: &mut File, out: &mpsc::Sender<Result<LogsChunk, Status>>) -> io::Result<()> {
    loop {
        let mut data = vec![0; CHUNK];
        let n = file.read(&mut data).await?;
        data.truncate(n);
        if n == 0 || out.send(Ok(LogsChunk { data })).await.is_err() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use hearth_core::lifecycle::SandboxState;
    use hearth_core::record::Record;
    use hearth_core::spec::{SandboxSpec, VmmKind};

    use super::*;

    fn view() -> View {
        let spec = SandboxSpec {
            template: "base".parse().unwrap(),
            cpus: 1,
            memory_mib: 128,
            disk_mib: 64,
            timeout_seconds: None,
            net: true,
            vmm: VmmKind::Process,
            env: vec![],
            disk_rate: Default::default(),
        };
        let record = Record {
            schema: Record::SCHEMA,
            id: "a1b2c3d4e5f6g7h8".parse().unwrap(),
            name: "a".parse().unwrap(),
            spec,
            state: SandboxState::Running,
            created_at_ms: 1,
            ends_at_ms: None,
            boot_id: "b".into(),
            slot: None,
            shim: None,
            resources: vec![],
            stuck: None,
        };
        let state = record.state;
        View { record, state, steps: vec![], shim: None, unreachable: None, exit: None, gone: false }
    }

    #[tokio::test]
    async fn a_follower_goes_on_when_the_log_is_turned_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = hearth_vmm::console::CappedLog::open(&path, 4096).unwrap();
        let (shown, seen) = watch::channel(view());
        let (out, mut chunks) = mpsc::channel(4);
        let follower = follow(path.clone(), seen, true, out);
        let mut wrote = Vec::new();
        let writer = async {
            for n in 0..8 {
                // Each fills a third of a part, and the follower looks in between.
                let mut piece = Vec::new();
                while piece.len() < 1300 {
                    writeln!(piece, "{n}: line").unwrap();
                }
                log.write(&piece).unwrap();
                wrote.extend(piece);
                tokio::time::sleep(LOOK * 3).await;
            }
            shown.send_modify(|v| v.gone = true);
        };
        let reader = async {
            let mut read = Vec::new();
            while let Some(chunk) = chunks.recv().await {
                read.extend(chunk.unwrap().data);
            }
            read
        };
        let ((), (), read) = futures::join!(follower, writer, reader);
        assert!(dir.path().join("console.log.1").exists(), "it was never turned over");
        assert_eq!(String::from_utf8(read).unwrap(), String::from_utf8(wrote).unwrap());
    }
}
