//! Threads for system calls that may block. A bounded number, of one disk only: when the disk stalls, its threads
//! stall and nobody else's. Threads start when there is work and end when there was none for a while.
//!
//! Work that waits is dropped with its caller. Work that has begun cannot be taken back from the kernel: it keeps what it
//! owns until the call returns, and is counted meanwhile.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

use super::backend::{BlockError, Limit};

/// A thread without work for this long ends.
const IDLE: Duration = Duration::from_secs(5);

type Work = Box<dyn FnOnce(&AtomicBool) + Send>;

/// A bounded set of threads. Clones are the same set.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    name: Arc<str>,
    most: usize,
    state: Mutex<State>,
    work: Condvar,
    /// A thread ended.
    ended: Notify,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<Job>>,
    threads: usize,
    idle: usize,
    running: usize,
    /// A job that must be alone among its kind is running.
    lane_busy: bool,
    /// A thread was woken or started, and has not looked yet: it wakes the next itself, if there is more to do.
    waking: bool,
    closed: bool,
}

impl State {
    /// The first job that may run now.
    fn next(&self) -> Option<usize> {
        self.queue.iter().position(|job| !(job.in_lane && self.lane_busy))
    }
}

/// Work on its way; whoever takes it out has it.
struct Job {
    work: Mutex<Option<Work>>,
    /// One after the other.
    in_lane: bool,
    /// The caller has gone: long work looks now and then.
    given_up: AtomicBool,
}

/// The caller's end of a job. Dropped, the job is given up.
struct Ticket(Arc<Job>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.given_up.store(true, Ordering::Relaxed);
        // What has not begun is dropped here, with all it owns.
        drop(lock(&self.0.work).take());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code of ours panics while it holds one of these, and the counts stay right if it did.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// At most `most` threads, at least one, with `name` in errors and in their own names.
    #[must_use]
    pub fn new(name: &str, most: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                name: name.into(),
                most: most.max(1),
                state: Mutex::default(),
                work: Condvar::new(),
                ended: Notify::new(),
            }),
        }
    }

    /// Runs `work` on a thread of the pool. It is told when nobody waits for it any more.
    ///
    /// # Errors
    /// [`BlockError::Stopped`] also once the pool is closed; [`BlockError::Io`] if there is no thread to be had, or
    /// the work panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        limit: &Limit,
        work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
    ) -> Result<T, BlockError> {
        self.start(limit, false, work).await
    }

    /// Like [`Pool::run`], for work of which only one may run at a time: it waits for its turn without a thread.
    ///
    /// # Errors
    /// As [`Pool::run`].
    pub async fn run_in_turn<T: Send + 'static>(
        &self,
        limit: &Limit,
        work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
    ) -> Result<T, BlockError> {
        self.start(limit, true, work).await
    }

    async fn start<T: Send + 'static>(
        &self,
        limit: &Limit,
        in_lane: bool,
        work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
    ) -> Result<T, BlockError> {
        let (tx, rx) = oneshot::channel();
        let hold = limit.hold();
        let work = move |given_up: &AtomicBool| {
            // Nobody may be there to take it; then it is dropped here, after the kernel is done with it.
            drop(tx.send(work(given_up)));
            drop(hold);
        };
        let work: Work = Box::new(work);
        let job = Arc::new(Job { work: Mutex::new(Some(work)), in_lane, given_up: AtomicBool::new(false) });
        let ticket = Ticket(job.clone());
        self.submit(job)?;
        let answer = limit.bound(rx).await;
        drop(ticket);
        answer?.map_err(|_| match lock(&self.shared.state).closed {
            true => BlockError::Stopped,
            false => self.error("work on", io::Error::other("the work panicked")),
        })
    }

    fn submit(&self, job: Arc<Job>) -> Result<(), BlockError> {
        let mut state = lock(&self.shared.state);
        if state.closed {
            return Err(BlockError::Stopped);
        }
        state.queue.push_back(job);
        if let Err(e) = self.shared.wake(&mut state)
            // The others will get to it.
            && state.threads == 0
        {
            state.queue.pop_back();
            drop(state);
            return Err(self.error("start a thread for", e));
        }
        Ok(())
    }

    fn error(&self, doing: &'static str, source: io::Error) -> BlockError {
        BlockError::Io { doing, file: self.shared.name.clone(), source }
    }

    /// Calls that a thread is in right now.
    #[must_use]
    pub fn running(&self) -> usize {
        lock(&self.shared.state).running
    }

    /// Takes no more work, drops what waits, and waits up to `within` for the rest. Gives the number of calls that the
    /// kernel did not give back; their threads stay, with what they hold.
    pub async fn close(&self, within: Duration) -> usize {
        let deadline = Instant::now() + within;
        let dropped = {
            let mut state = lock(&self.shared.state);
            state.closed = true;
            std::mem::take(&mut state.queue)
        };
        for job in dropped {
            drop(lock(&job.work).take());
        }
        self.shared.work.notify_all();
        loop {
            let ended = self.shared.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            {
                let state = lock(&self.shared.state);
                if state.threads == 0 {
                    return 0;
                }
            }
            if timeout_at(deadline, ended).await.is_err() {
                let left = self.running();
                if left > 0 {
                    tracing::error!(disk = %self.shared.name, calls = left, "the kernel did not give back all I/O; its threads and buffers stay");
                }
                return left;
            }
        }
    }
}

impl Shared {
    /// Has one more thread look for work, if there is some that it could do. One at a time: calls that the page cache answers
    /// are done by the first before a second has woken up.
    fn wake(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        if state.waking || state.next().is_none() {
            return Ok(());
        }
        if state.idle > 0 {
            self.work.notify_one();
        } else if state.threads < self.most {
            let shared = self.clone();
            // Few are needed at once: what the kernel uses of a stack is its own.
            let thread = std::thread::Builder::new().name("hearth-block".into()).stack_size(256 * 1024);
            thread.spawn(move || shared.live())?;
            state.threads += 1;
        } else {
            // The next that is done looks again.
            return Ok(());
        }
        state.waking = true;
        Ok(())
    }

    fn live(self: Arc<Self>) {
        let mut state = lock(&self.state);
        state.waking = false;
        loop {
            if let Some(job) = state.next().and_then(|at| state.queue.remove(at)) {
                state.running += 1;
                state.lane_busy |= job.in_lane;
                if let Err(error) = self.wake(&mut state) {
                    tracing::warn!(disk = %self.name, %error, "no further thread; requests take longer");
                }
                drop(state);
                let work = lock(&job.work).take();
                if let Some(work) = work {
                    // A panic is told to the caller by the answer that never comes.
                    let run = std::panic::AssertUnwindSafe(|| work(&job.given_up));
                    drop(std::panic::catch_unwind(run));
                }
                state = lock(&self.state);
                state.running -= 1;
                if job.in_lane {
                    state.lane_busy = false;
                }
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let (back, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = back;
            state.idle -= 1;
            state.waking = false;
            if waited.timed_out() && state.next().is_none() {
                break;
            }
        }
        state.threads -= 1;
        drop(state);
        self.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    use tokio_util::sync::CancellationToken;

    const LONG: Duration = Duration::from_secs(60);

    /// Work that sits in the "kernel" until it is let go.
    fn stalled() -> (mpsc::Sender<()>, impl FnOnce(&AtomicBool) + Send) {
        let (tx, rx) = mpsc::channel::<()>();
        (tx, move |_: &AtomicBool| {
            rx.recv().ok();
        })
    }

    #[tokio::test]
    async fn a_call_that_stalls_ends_for_its_caller_and_keeps_what_it_holds() {
        let pool = Pool::new("test", 1);
        let (release, work) = stalled();
        let held = Arc::new(());
        let stop = CancellationToken::new();
        let limit = Limit::new(stop.clone(), Instant::now() + LONG).holding(held.clone());
        // Given up when the kernel has it, not before.
        let begun = move |stopped: &AtomicBool| {
            stop.cancel();
            work(stopped);
        };
        assert!(matches!(pool.run(&limit, begun).await, Err(BlockError::Stopped)));
        drop(limit);
        assert_eq!((pool.running(), Arc::strong_count(&held)), (1, 2));
        assert_eq!(pool.close(Duration::from_millis(20)).await, 1);
        drop(release);
        assert_eq!(pool.close(LONG).await, 0);
        assert_eq!((pool.running(), Arc::strong_count(&held)), (0, 1));
        assert!(matches!(pool.run(&Limit::within(LONG), |_| ()).await, Err(BlockError::Stopped)));
    }

    #[tokio::test]
    async fn work_that_waits_is_dropped_with_its_caller() {
        let pool = Pool::new("test", 1);
        let (release, work) = stalled();
        let long = Limit::within(LONG);
        let mut first = Box::pin(pool.run(&long, work));
        assert!(futures::poll!(&mut first).is_pending());
        let held = Arc::new(());
        let limit = long.holding(held.clone());
        let mut second = Box::pin(pool.run(&limit, |_| unreachable!("it was given up")));
        assert!(futures::poll!(&mut second).is_pending());
        assert_eq!(Arc::strong_count(&held), 3);
        drop(second);
        assert_eq!(Arc::strong_count(&held), 2, "only the limit itself");
        drop(release);
        first.await.unwrap();
        assert_eq!(pool.close(LONG).await, 0);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_and_the_thread_lives_on() {
        let pool = Pool::new("disk 7", 1);
        let limit = Limit::within(LONG);
        let error = pool.run(&limit, |_| panic!("on purpose")).await.unwrap_err();
        assert!(error.to_string().contains("disk 7"), "{error}");
        assert_eq!(pool.run(&limit, |_| 3).await.unwrap(), 3);
        assert_eq!(pool.close(LONG).await, 0);
    }

    #[tokio::test]
    async fn work_in_turn_takes_one_thread_and_holds_up_no_other_work() {
        let pool = Pool::new("test", 4);
        let (release, work) = stalled();
        let long = Limit::within(LONG);
        let mut first = Box::pin(pool.run_in_turn(&long, work));
        assert!(futures::poll!(&mut first).is_pending());
        let mut rest: Vec<_> = (0..10).map(|n| Box::pin(pool.run_in_turn(&long, move |_| n))).collect();
        for work in &mut rest {
            assert!(futures::poll!(work).is_pending());
        }
        assert_eq!(pool.run(&long, |_| 7).await.unwrap(), 7);
        assert!(futures::poll!(&mut rest[0]).is_pending(), "two took their turn at once");
        drop(rest.remove(3));
        drop(release);
        first.await.unwrap();
        let done = futures::future::join_all(rest).await;
        let done: Vec<i32> = done.into_iter().map(|n| n.unwrap()).collect();
        assert_eq!(done, [0, 1, 2, 4, 5, 6, 7, 8, 9]);
        assert_eq!(pool.close(LONG).await, 0);
    }
}
