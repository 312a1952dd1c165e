//! Which index a network block device gets, and when an index may be used again. Pure: whether one is quiet is seen by the
//! caller.
//!
//! `Free → Used → Free` if it was proven quiet, else `Used → Quarantined → Free` once it is. What is not proven stays out,
//! and so does what somebody else has: `Foreign`, until it is quiet.

use std::collections::VecDeque;
use std::fmt;

/// What one index is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Used,
    Quarantined,
    Foreign,
}

/// What was seen of an index that somebody let go of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// No task, size 0, nothing in flight, no holders.
    Quiet,
    /// Somebody else has it.
    Foreign,
    /// Anything else, or it could not be seen.
    Unproven,
}

/// How many there are of what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Handed out.
    pub used: u32,
    /// Not handed out, since they are not proven quiet.
    pub quarantined: u32,
    /// Not handed out, since somebody else has them.
    pub foreign: u32,
    /// All.
    pub limit: u32,
}

impl Counts {
    /// Those that can be handed out.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.limit.saturating_sub(self.used + self.quarantined + self.foreign)
    }
}

/// No index is free. `RESOURCE_EXHAUSTED` to a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub struct Exhausted(pub Counts);

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { used, quarantined, foreign, limit } = self.0;
        write!(
            f,
            "no network block device is free: {used} used, {quarantined} quarantined, {foreign} of others, limit {limit}; \
             load nbd with a greater nbds_max"
        )
    }
}

/// The indexes of one host. Every call takes constant time.
#[derive(Debug, Clone)]
pub struct NbdPool {
    states: Vec<State>,
    /// The one that rested longest first: what the kernel does late hits nobody.
    free: VecDeque<u32>,
    /// Those in quarantine and those of others, in the order of their next look.
    suspects: VecDeque<u32>,
    used: u32,
    foreign: u32,
}

impl NbdPool {
    /// Of the indexes below `limit` (`nbds_max`), those are free that were seen to be quiet.
    #[must_use]
    pub fn new(limit: u32, proof: impl Fn(u32) -> Proof) -> Self {
        let (free, suspects) = (VecDeque::new(), VecDeque::new());
        let mut pool = Self { states: vec![], free, suspects, used: 0, foreign: 0 };
        for index in 0..limit {
            pool.states.push(State::Used);
            pool.settle(index, proof(index));
        }
        pool
    }

    fn settle(&mut self, index: u32, proof: Proof) {
        let (state, queue) = match proof {
            Proof::Quiet => (State::Free, &mut self.free),
            Proof::Foreign => (State::Foreign, &mut self.suspects),
            Proof::Unproven => (State::Quarantined, &mut self.suspects),
        };
        self.foreign += u32::from(state == State::Foreign);
        self.states[index as usize] = state;
        queue.push_back(index);
    }

    /// Hands out an index.
    ///
    /// # Errors
    /// [`Exhausted`], with what there is of what.
    pub fn acquire(&mut self) -> Result<u32, Exhausted> {
        let index = self.free.pop_front().ok_or_else(|| Exhausted(self.counts()))?;
        self.states[index as usize] = State::Used;
        self.used += 1;
        Ok(index)
    }

    /// Hands out this very one, whatever it is: to who had it before the pool was made. False if somebody has it, or there
    /// is no such index. Takes time by the number of indexes.
    pub fn hold(&mut self, index: u32) -> bool {
        let Some(state) = self.states.get_mut(index as usize) else { return false };
        if *state == State::Used {
            return false;
        }
        self.foreign -= u32::from(*state == State::Foreign);
        *state = State::Used;
        self.used += 1;
        self.free.retain(|other| *other != index);
        self.suspects.retain(|other| *other != index);
        true
    }

    /// Takes one back, into quarantine if it is not proven quiet. False: it was not handed out, and nothing changed.
    pub fn give_back(&mut self, index: u32, proof: Proof) -> bool {
        if self.states.get(index as usize) != Some(&State::Used) {
            return false;
        }
        self.used -= 1;
        self.settle(index, proof);
        true
    }

    /// The index to look at next, of those that are not proven quiet or somebody else's; each gets its turn. Tell
    /// [`Self::looked`] what was seen.
    pub fn suspect(&mut self) -> Option<u32> {
        self.suspects.pop_front().inspect(|index| self.suspects.push_back(*index))
    }

    /// What was seen of the index that [`Self::suspect`] named last. False: it is not that one.
    pub fn looked(&mut self, index: u32, proof: Proof) -> bool {
        if self.suspects.back() != Some(&index) {
            return false;
        }
        self.suspects.pop_back();
        self.foreign -= u32::from(self.states[index as usize] == State::Foreign);
        self.settle(index, proof);
        true
    }

    /// How many there are of what, for an error and a gauge.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let quarantined = self.suspects.len() as u32 - self.foreign;
        Counts { used: self.used, quarantined, foreign: self.foreign, limit: self.states.len() as u32 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const TAKERS: usize = 16;

    #[derive(Debug, Clone)]
    enum Op {
        Acquire(usize),
        Return(usize, Proof),
        ReturnAgain(u32),
        Look(Proof),
        Hold(usize, u32),
    }

    fn proof() -> impl Strategy<Value = Proof> {
        prop_oneof![3 => Just(Proof::Quiet), 1 => Just(Proof::Unproven), 1 => Just(Proof::Foreign)]
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..TAKERS).prop_map(Op::Acquire),
            4 => (0..TAKERS, proof()).prop_map(|(taker, proof)| Op::Return(taker, proof)),
            1 => (0_u32..12).prop_map(Op::ReturnAgain),
            2 => proof().prop_map(Op::Look),
            1 => (0..TAKERS, 0_u32..12).prop_map(|(taker, index)| Op::Hold(taker, index)),
        ]
    }

    proptest! {
        #[test]
        fn sixteen_takers_never_share_an_index_and_none_is_handed_out_unproven(
            limit in 0_u32..10,
            loud in 0_u32..10,
            ops in prop::collection::vec(op(), 1..200),
        ) {
            let first = |index| if index == loud { Proof::Unproven } else { Proof::Quiet };
            let mut pool = NbdPool::new(limit, first);
            let mut held: BTreeMap<usize, u32> = BTreeMap::new();
            let mut unproven: BTreeMap<u32, Proof> =
                (0..limit).filter(|i| *i == loud).map(|i| (i, Proof::Unproven)).collect();
            for op in ops {
                match op {
                    Op::Acquire(taker) if held.contains_key(&taker) => {}
                    Op::Acquire(taker) => match pool.acquire() {
                        Ok(index) => {
                            prop_assert!(index < limit && !unproven.contains_key(&index));
                            prop_assert!(!held.values().any(|h| *h == index));
                            held.insert(taker, index);
                        }
                        Err(Exhausted(counts)) => {
                            prop_assert_eq!(held.len() + unproven.len(), limit as usize);
                            prop_assert_eq!(counts, pool.counts());
                        }
                    },
                    Op::Return(taker, proof) => if let Some(index) = held.remove(&taker) {
                        prop_assert!(pool.give_back(index, proof));
                        if proof != Proof::Quiet {
                            unproven.insert(index, proof);
                        }
                    },
                    Op::Hold(taker, index) => if !held.contains_key(&taker) {
                        let free = index < limit && !held.values().any(|h| *h == index);
                        prop_assert_eq!(pool.hold(index), free);
                        if free {
                            unproven.remove(&index);
                            held.insert(taker, index);
                        }
                    },
                    Op::ReturnAgain(index) => if !held.values().any(|h| *h == index) {
                        prop_assert!(!pool.give_back(index, Proof::Quiet));
                    },
                    Op::Look(proof) => {
                        let suspect = pool.suspect();
                        prop_assert_eq!(suspect.is_some(), !unproven.is_empty());
                        if let Some(index) = suspect {
                            prop_assert!(unproven.remove(&index).is_some() && pool.looked(index, proof));
                            if proof != Proof::Quiet {
                                unproven.insert(index, proof);
                            }
                        }
                    }
                }
                let foreign = unproven.values().filter(|p| **p == Proof::Foreign).count() as u32;
                let (used, quarantined) = (held.len() as u32, unproven.len() as u32 - foreign);
                prop_assert_eq!(pool.counts(), Counts { used, quarantined, foreign, limit });
                prop_assert_eq!(pool.counts().free(), limit - used - unproven.len() as u32);
            }
        }
    }

    #[test]
    fn each_suspect_gets_its_turn_and_an_exhausted_pool_names_what_there_is() {
        let mut pool = NbdPool::new(3, |index| if index == 0 { Proof::Quiet } else { Proof::Unproven });
        assert_eq!(pool.acquire(), Ok(0));
        let text = pool.acquire().unwrap_err().to_string();
        assert!(text.contains("1 used, 2 quarantined, 0 of others, limit 3"), "{text}");
        assert_eq!([pool.suspect(), pool.suspect(), pool.suspect()], [Some(1), Some(2), Some(1)]);
        assert!(!pool.looked(2, Proof::Quiet));
        assert!(pool.looked(1, Proof::Quiet));
        assert_eq!(pool.acquire(), Ok(1));
        assert_eq!(pool.suspect(), Some(2));
        assert!(pool.looked(2, Proof::Foreign));
        let text = pool.acquire().unwrap_err().to_string();
        assert!(text.contains("2 used, 0 quarantined, 1 of others, limit 3"), "{text}");
    }
}
