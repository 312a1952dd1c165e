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
