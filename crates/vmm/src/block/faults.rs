//! Makes the faults happen that were ordered at the block server's places; see docs/failpoints.md.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use hearth_core::failpoint::{Action, Failpoints, Fault};
use hearth_core::steps::{BlockPlace, Place};

use super::backend::{Answer, BlockError, Limit};
use super::wrap::{Around, Call};

/// The faults of one shim, and how often each place was passed. Clones are the same.
#[derive(Debug, Clone)]
pub struct BlockFaults {
    points: Arc<Failpoints>,
    passed: Arc<Mutex<BTreeMap<BlockPlace, u64>>>,
}

impl BlockFaults {
    /// `None` if none are ordered.
    ///
    /// # Errors
    /// In words, if the text is not understood.
    pub fn parse(text: &str) -> Result<Option<Self>, String> {
        let points = Failpoints::parse_text(text)?;
        let some = points != Failpoints::default();
        Ok(some.then(|| Self { points: Arc::new(points), passed: Arc::default() }))
    }

    /// Passes a place: how often that was by now.
    fn pass(&self, place: BlockPlace) -> u64 {
        // A count is whole at any time.
        let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        let n = passed.entry(place).or_default();
        *n += 1;
        *n
    }

    /// Does what is due the `n`-th time, in its order.
    async fn strike(&self, place: BlockPlace, n: u64, after: bool) -> Result<(), String> {
        let place = Place::Block(place);
        let due = self.points.due(place, n);
        strike(place, due.iter().filter(|fault| fault.after == after)).await
    }

    /// Passes `place` with `effect`, which is all that happens there. `failed` makes an error of an ordered one.
    ///
    /// # Errors
    /// From the effect, or as ordered.
    ///
    /// # Panics
    /// As ordered.
    pub async fn at<T, E>(
        &self,
        place: BlockPlace,
        failed: impl Fn(String) -> E,
        effect: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let n = self.pass(place);
        self.strike(place, n, false).await.map_err(&failed)?;
        let done = effect.await?;
        self.strike(place, n, true).await.map_err(&failed)?;
        Ok(done)
    }

    /// What is ordered where no effect is that could end: for ever, if it is no error.
    pub async fn end_of(&self, place: BlockPlace) -> String {
        let n = self.pass(place);
        match self.strike(place, n, false).await {
            Err(why) => why,
            Ok(()) => std::future::pending().await,
        }
    }
}

fn place(call: Call) -> Option<BlockPlace> {
    match call {
        Call::Read => Some(BlockPlace::Read),
        Call::Write | Call::Discard | Call::Zeroes => Some(BlockPlace::Write),
        Call::Flush => Some(BlockPlace::Flush),
        Call::Extents => None,
    }
}

#[allow(clippy::panic)]
async fn strike(place: Place, due: impl Iterator<Item = &Fault>) -> Result<(), String> {
    for fault in due {
        tracing::warn!("failpoint at {place}: {fault}");
        match fault.action {
            Action::Error => return Err("failpoint".into()),
            Action::Delay(time) => tokio::time::sleep(time).await,
            // The shim has one thread.
            Action::Block(time) => std::thread::sleep(time),
            Action::Panic => panic!("failpoint at {place}"),
            Action::Kill9 => hearth_host::process::kill_self(),
        }
    }
    Ok(())
}

impl BlockFaults {
    async fn around(&self, call: Call, n: u64, after: bool, limit: &Limit) -> Result<(), BlockError> {
        let Some(place) = place(call) else { return Ok(()) };
        let failed =
            |why| BlockError::Io { doing: "use", file: "the disk".into(), source: io::Error::other(why) };
        limit.bound(self.strike(place, n, after)).await?.map_err(failed)
    }
}

impl Around for BlockFaults {
    fn before<'a>(&'a self, call: Call, limit: &'a Limit) -> Answer<'a, u64> {
        Box::pin(async move {
            let n = place(call).map_or(0, |place| self.pass(place));
            self.around(call, n, false, limit).await?;
            Ok(n)
        })
    }

    fn after<'a>(&'a self, call: Call, n: u64, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(self.around(call, n, true, limit))
    }
}
