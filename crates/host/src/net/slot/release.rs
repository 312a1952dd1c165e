//! Removes slots, one or thousands, by one way: take the host's addresses off in a batch, take the names of the
//! namespaces away, and wait for the kernel to tell that the host's ends of their links are gone.
//!
//! Order and reasons, all measured:
//!
//! - Never a link by itself: that waits for a grace period (17-20 ms) under the lock of all links. A namespace takes
//!   its links with it, and the kernel's one worker takes all namespaces that are due at once.
//! - Addresses first: cleaning up routes is what makes the death of many links quadratic.
//! - All are looked at before the first of them goes: a look wants the lock that the worker holds while links die, 0.5 ms
//!   a slot then, 0.1 ms before.
//! - Names go before anything dies: an unmount takes 0.08 ms in peace and up to 1 ms while the worker waits for grace
//!   periods of its own. A descriptor keeps each namespace alive until all of a batch have lost their names.
//! - A batch is let go at once, and the next begins when it is gone: the worker looks for each namespace that dies in all
//!   that live on, so few large batches are less work for it than many small ones.
//! - Links that are gone are heard of by netlink events.
//!
//! The host's end is the witness of a namespace's death: as long as anything holds the namespace (a process, a socket,
//! a tap's descriptor) it is there. It is never deleted to make a slot look gone.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use hearth_core::host::{HostError, Pace, SlotRelease, SlotSeen};
use hearth_core::network::{SlotIndex, SlotLayout};

use super::dying::{Deaths, Dying, Fate};
use super::held::Held;
use crate::net::error::{Op, Result};
use crate::net::netlink::tolerate;
use crate::net::netns::{self, NsId, Place};
use crate::net::rtnl::{Link, Rtnl, delete_address, set_alias};
use crate::net::{holders, veth};
use crate::process;

/// Longest wait between two looks at deadlines and at processes that were told to end.
const TICK: Duration = Duration::from_millis(20);
/// Netlink messages sent in one run: their acknowledgements must fit the socket's buffer.
const RUN: usize = 512;
/// Slots looked at before the first one goes: at most a second or two.
const AHEAD: usize = 10_000;
/// Slots looked at, or without their names, before the pace is asked again.
const SLICE: usize = 16;
/// Namespaces kept alive without their names: so many descriptors, and no more than a quarter of what may be open.
const KEPT: usize = 4096;

/// Finds out which processes are this instance's: pid and the cgroup that proves it.
pub type OwnProcesses<'a> = dyn Fn() -> Result<BTreeMap<u32, String>> + 'a;

/// Removes one slot.
///
/// # Errors
/// If it is not gone.
pub fn release_one(
    layout: &SlotLayout,
    slot: SlotIndex,
    order: &SlotRelease<'_>,
    own: &OwnProcesses<'_>,
) -> Result<()> {
    let mut result = Ok(());
    release(layout, &[slot], order, own, &mut |_, seen| result = seen);
    result
}

/// Removes slots; see [`hearth_core::host::Host::release_slots`].
pub fn release(
    layout: &SlotLayout,
    slots: &[SlotIndex],
    order: &SlotRelease<'_>,
    own: &OwnProcesses<'_>,
    seen: &mut SlotSeen<'_>,
) {
    let op = Op::new("release", "slots");
    // Events before the first look: nothing that goes in between is missed.
    let sockets = Deaths::open(order.within).and_then(|deaths| Ok((deaths, Rtnl::open()?)));
    let (deaths, rtnl) = match sockets.map_err(|e| op.netlink("open route sockets", e)) {
        Ok(sockets) => sockets,
        Err(e) => return slots.iter().for_each(|slot| seen(*slot, Err(again(layout, *slot, &e)))),
    };
    let mut release = Release {
        layout,
        order,
        own,
        seen,
        rtnl,
        deaths,
        waiting: slots.iter().copied().collect(),
        next: VecDeque::new(),
        kept: VecDeque::new(),
        most_kept: KEPT.min(process::nofile_limit() / 4).max(1),
        held: Vec::new(),
        inside: Inside::default(),
    };
    release.run();
}

struct Release<'a> {
    layout: &'a SlotLayout,
    order: &'a SlotRelease<'a>,
    own: &'a OwnProcesses<'a>,
    seen: &'a mut SlotSeen<'a>,
    rtnl: Rtnl,
    deaths: Deaths,
    waiting: VecDeque<SlotIndex>,
    /// Looked at and without address: the next to go.
    next: VecDeque<Ready>,
    /// Without their names, and kept alive until they may die.
    kept: VecDeque<Kept>,
    most_kept: usize,
    /// Kept by processes of ours that were told to end.
    held: Vec<Held>,
    inside: Inside,
}

/// A slot about to be touched.
struct Ready {
    slot: SlotIndex,
    /// The namespace seen under its name.
    id: Option<NsId>,
    witness: Option<Link>,
    /// What stays in its place afterwards: something with the name of its link.
    stranger: Option<String>,
}

/// A slot whose namespace has lost its name.
struct Kept {
    slot: SlotIndex,
    ids: Vec<NsId>,
    witness: Link,
    /// Keeps it alive.
    _namespace: Option<OwnedFd>,
}

impl Release<'_> {
    fn run(&mut self) {
        while self.has_work() || !self.deaths.is_empty() || !self.held.is_empty() {
            let mut pause = TICK;
            if self.has_work() {
                match (self.order.pace)() {
                    // While somebody creates the lock is theirs.
                    Pace::AtMost(n) if n > SLICE && self.has_much_to_look_at() => {
                        self.look_ahead(SLICE);
                        pause = Duration::ZERO;
                    }
                    Pace::AtMost(n) => pause = self.go_on(n.clamp(1, self.most_kept)),
                    Pace::Wait(time) => pause = time.min(TICK),
                    Pace::End => {
                        self.waiting.clear();
                        self.next.clear();
                        self.let_go(self.kept.len());
                    }
                }
            }
            self.look_after_held();
            if !self.deaths.is_empty() {
                self.wait_for_links(pause);
            } else if self.has_work() || !self.held.is_empty() {
                std::thread::sleep(pause);
            }
        }
    }

    /// Whether there are slots that do not die yet.
    fn has_work(&self) -> bool {
        !(self.waiting.is_empty() && self.next.is_empty() && self.kept.is_empty())
    }

    /// Takes names away until `n` namespaces have none, then lets them die. Answers how long to wait.
    fn go_on(&mut self, n: usize) -> Duration {
        if self.deaths.pending() > 0 {
            return TICK;
        }
        if self.kept.len() < n {
            self.begin(SLICE.min(n - self.kept.len()));
            if self.kept.len() < n && !(self.waiting.is_empty() && self.next.is_empty()) {
                return Duration::ZERO;
            }
        }
        self.let_go(n);
        TICK
    }

    /// Lets some of those without names die: all at once, when the last descriptor of them is closed.
    fn let_go(&mut self, n: usize) {
        let gone: Vec<Kept> = self.kept.drain(..n.min(self.kept.len())).collect();
        let together = self.deaths.pending() + gone.len();
        for kept in &gone {
            let (witness, ids) = (&kept.witness, kept.ids.clone());
            self.deaths.add(together, witness.index, &witness.name, kept.slot, ids, witness.peer_nsid);
        }
    }

    /// Whether many slots are to be looked at, and the kernel's worker is at rest.
    fn has_much_to_look_at(&self) -> bool {
        self.deaths.is_empty() && self.waiting.len() > SLICE && self.next.len() < AHEAD
    }

    fn begin(&mut self, n: usize) {
        self.look_ahead(n.saturating_sub(self.next.len()));
        for ready in self.next.drain(..n.min(self.next.len())).collect::<Vec<_>>() {
            let slot = ready.slot;
            match self.entered(&ready) {
                // It is looked at again: whoever came in since may be a stranger.
                Ok(true) => self.waiting.push_back(slot),
                Ok(false) => {
                    if let Err(e) = self.unlink(&ready) {
                        self.tell(slot, Err(e));
                    }
                }
                Err(e) => self.tell(slot, Err(e)),
            }
        }
    }

    /// Makes `n` more ready to lose their names.
    fn look_ahead(&mut self, n: usize) {
        let n = n.min(self.waiting.len());
        let slots: Vec<SlotIndex> = self.waiting.drain(..n).collect();
        let ready = self.prepare(&slots);
        self.next.extend(ready);
    }

    fn tell(&mut self, slot: SlotIndex, result: Result<()>) {
        (self.seen)(slot, result);
    }

    /// Looks at slots and takes their addresses off; what cannot be released is told.
    fn prepare(&mut self, batch: &[SlotIndex]) -> Vec<Ready> {
        let mut ready = Vec::new();
        for slot in batch {
            match self.examine(*slot) {
                Ok(Some(r)) => ready.push(r),
                Ok(None) => {}
                Err(e) => self.tell(*slot, Err(e)),
            }
        }
        self.strip(ready)
    }

    /// Looks at a slot without changing it. Nothing if its processes have to end first.
    fn examine(&mut self, slot: SlotIndex) -> Result<Option<Ready>> {
        let op = op(self.layout, slot);
        let veth = self.layout.veth(slot);
        let mut ready = Ready { slot, id: None, witness: None, stranger: None };
        let link = self.rtnl.link(&veth).map_err(|e| op.netlink(&format!("look for {veth}"), e))?;
        if let Some(link) = link {
            match veth::stranger(&op, &mut self.rtnl, self.layout, slot, &link)? {
                Some(why) => ready.stranger = Some(format!("{veth} {why}")),
                None => ready.witness = Some(link),
            }
        }
        match netns::look(&op, &netns::path(self.layout, slot))? {
            Place::Foreign(why) => return Err(op.foreign(why)),
            Place::Absent | Place::Half => {}
            Place::Namespace(_, id) => {
                if let Some(held) = self.held_by(&op, slot, id)? {
                    self.held.push(held);
                    return Ok(None);
                }
                ready.id = Some(id);
            }
        }
        Ok(Some(ready))
    }

    /// Whether a process went in since the slot was looked at, which may be seconds ago.
    fn entered(&mut self, ready: &Ready) -> Result<bool> {
        let Some(id) = ready.id else { return Ok(false) };
        let found = self.inside.of(id).map_err(|e| op(self.layout, ready.slot).io("read /proc", e))?;
        if found.is_some() {
            self.inside.forget();
        }
        Ok(found.is_some())
    }

    /// The processes of ours that have to end before the slot can; an error if one is not ours.
    fn held_by(&mut self, op: &Op, slot: SlotIndex, id: NsId) -> Result<Option<Held>> {
        let Some(pids) = self.inside.of(id).map_err(|e| op.io("read /proc", e))? else { return Ok(None) };
        // Descriptors before proofs: a signal then reaches the process that was proven, or nobody.
        let mut found = Vec::new();
        for pid in pids {
            found.extend(process::pidfd("release", pid)?.map(|fd| (pid, fd)));
        }
        let own = if found.is_empty() { BTreeMap::new() } else { (self.own)()? };
        let mut ours: Vec<(u32, OwnedFd)> = Vec::new();
        for (pid, fd) in found {
            // It may have ended, or gone elsewhere, since the look.
            if !holders::is_inside(pid, id).map_err(|e| op.io("read /proc", e))? {
                continue;
            }
            let who = holders::describe(pid);
            match own.get(&pid) {
                None => return Err(op.foreign(format!("{who} is inside and not of this instance"))),
                Some(cgroup) if self.order.spared.contains(cgroup) => {
                    return Err(op.busy(format!("{who} is inside and belongs to sandbox {cgroup}")));
                }
                Some(_) => ours.push((pid, fd)),
            }
        }
        if ours.is_empty() {
            return Ok(None);
        }
        Held::tell_to_end(op, slot, ours, self.order).map(Some)
    }

    /// Marks links and takes addresses off, in batches. What fails is told and not touched further.
    fn strip(&mut self, ready: Vec<Ready>) -> Vec<Ready> {
        let mut messages = Vec::new();
        let mut of = Vec::new();
        for (place, r) in ready.iter().enumerate() {
            let Some(w) = &r.witness else { continue };
            let name = self.layout.netns(r.slot);
            if w.alias != name {
                // What proves it ours is about to go; the next try needs a proof if this one fails.
                messages.push(set_alias(w.index, &name));
                of.push(place);
            }
            let address = self.layout.host_address(r.slot);
            messages.push(delete_address(w.index, address, veth::PREFIX_LEN));
            of.push(place);
        }
        let mut failed: BTreeMap<usize, HostError> = BTreeMap::new();
        let mut of = of.into_iter();
        let mut messages = messages.into_iter().peekable();
        while messages.peek().is_some() {
            let run: Vec<_> = messages.by_ref().take(RUN).collect();
            let places: Vec<usize> = of.by_ref().take(run.len()).collect();
            match self.rtnl.each(run) {
                Ok(results) => {
                    for (place, result) in places.into_iter().zip(results) {
                        let fine = tolerate(result, &[libc::EADDRNOTAVAIL, libc::ENODEV]);
                        if let (Err(e), Some(r)) = (fine, ready.get(place)) {
                            let step = "mark its link and remove its address";
                            failed.entry(place).or_insert(op(self.layout, r.slot).netlink(step, e));
                        }
                    }
                }
                Err(e) => {
                    let text = e.to_string();
                    for place in places {
                        let Some(r) = ready.get(place) else { continue };
                        failed.entry(place).or_insert(op(self.layout, r.slot).failed(text.clone()));
                    }
                }
            }
        }
        let mut whole = Vec::new();
        for (place, r) in ready.into_iter().enumerate() {
            match failed.remove(&place) {
                Some(e) => self.tell(r.slot, Err(e)),
                None => whole.push(r),
            }
        }
        whole
    }

    fn unlink(&mut self, r: &Ready) -> Result<()> {
        let op = op(self.layout, r.slot);
        let path = netns::path(self.layout, r.slot);
        // Where there are no descriptors left it dies at once, and more slowly.
        let namespace = r.id.and_then(|id| netns::open_known(&path, id));
        let ids = netns::unlink(&op, &path, r.id)?;
        let Some(w) = &r.witness else {
            let foreign = r.stranger.as_ref().map(|why| op.foreign(why.clone()));
            self.tell(r.slot, foreign.map_or(Ok(()), Err));
            return Ok(());
        };
        if w.peer_nsid.is_none() {
            // Both ends are here: no namespace will take it along.
            self.rtnl.delete_link(w.index).map_err(|e| op.netlink("delete its link", e))?;
        }
        self.kept.push_back(Kept { slot: r.slot, ids, witness: w.clone(), _namespace: namespace });
        Ok(())
    }

    fn wait_for_links(&mut self, pause: Duration) {
        for (dying, fate) in self.deaths.wait(pause) {
            let result = match fate {
                Fate::Gone => Ok(()),
                Fate::Late => Err(self.late(&dying)),
                Fate::Unknown(e) => Err(op(self.layout, dying.slot).io("see its link gone", e)),
            };
            self.tell(dying.slot, result);
        }
    }

    fn late(&mut self, dying: &Dying) -> HostError {
        let op = op(self.layout, dying.slot);
        let why = format!("its link {} is still there after {:?}", dying.name, self.order.within);
        match holders::of_any(&mut self.rtnl, &dying.ids, dying.peer_nsid).as_slice() {
            [] => op.deadline(format!("{why}; no process is inside, a descriptor elsewhere may hold it")),
            list => op.busy(format!("{why}; held by {}", list.join(", "))),
        }
    }

    fn look_after_held(&mut self) {
        let mut still = Vec::new();
        for mut held in std::mem::take(&mut self.held) {
            match held.look(&op(self.layout, held.slot)) {
                Ok(true) => {
                    self.inside.forget();
                    self.waiting.push_back(held.slot);
                }
                Ok(false) => still.push(held),
                Err(e) => self.tell(held.slot, Err(e)),
            }
        }
        self.held = still;
    }
}

/// Who is inside which namespace, looked at again when the answer is old.
#[derive(Debug, Default)]
struct Inside {
    found: HashMap<NsId, Vec<u32>>,
    looked: Option<(Instant, Duration)>,
}

impl Inside {
    /// The processes inside one namespace. A look costs 25 ms with 5,000 processes, so it may be as old as ten
    /// times its cost; who enters later is noticed by the link that stays.
    fn of(&mut self, id: NsId) -> io::Result<Option<Vec<u32>>> {
        if self.looked.is_none_or(|(at, cost)| at.elapsed() > cost * 10) {
            let begun = Instant::now();
            self.found = holders::inside()?;
            self.looked = Some((Instant::now(), begun.elapsed()));
        }
        Ok(self.found.get(&id).cloned())
    }

    fn forget(&mut self) {
        self.looked = None;
    }
}

fn op(layout: &SlotLayout, slot: SlotIndex) -> Op {
    Op::new("release", format!("slot {slot} (netns {})", layout.netns(slot)))
}

/// The same error for another slot.
fn again(layout: &SlotLayout, slot: SlotIndex, e: &HostError) -> HostError {
    let cause = e.source.as_ref().map(|s| format!(": {s}")).unwrap_or_default();
    op(layout, slot).failed(format!("{}{cause}", e.why))
}
