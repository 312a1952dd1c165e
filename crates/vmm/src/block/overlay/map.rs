//! The map in memory: the state of every block, and which of its pages are newer than on disk. Pages that were never
//! written take no room. Pure.

use std::collections::BTreeSet;
use std::ops::Range;

use bytes::Bytes;

use super::format::{self, Copy, PAGE, PER_PAGE, State};

/// Bytes of states in a page.
const STATES: usize = (PER_PAGE / 4) as usize;

/// All pages.
pub(super) struct Map {
    pages: Vec<Option<Box<Page>>>,
    dirty: BTreeSet<usize>,
    /// Data was written, and maybe no page is dirty.
    unsynced: bool,
}

struct Page {
    states: [u8; STATES],
    /// Of the last copy that is known to be durable; 0: none is.
    sequence: u64,
    /// Which copy that is. The other is the one to write next.
    copy: u8,
}

impl Default for Page {
    fn default() -> Self {
        Self { states: [0; STATES], sequence: 0, copy: 1 }
    }
}

/// A page on its way to the disk.
#[derive(Clone)]
pub(super) struct Image {
    pub(super) page: usize,
    pub(super) copy: u8,
    sequence: u64,
    pub(super) bytes: Bytes,
}

impl Map {
    pub(super) fn new(pages: usize) -> Self {
        Self {
            pages: std::iter::repeat_with(|| None).take(pages).collect(),
            dirty: BTreeSet::new(),
            unsynced: false,
        }
    }

    /// Takes the two copies of a page as found on disk. False: neither can be used.
    ///
    /// A torn copy beside an empty or a good one is what a crash in a flush leaves: the other is the last that was
    /// made durable.
    pub(super) fn load(&mut self, page: usize, copies: [Copy; 2]) -> bool {
        let sequence = |copy: &Copy| match copy {
            Copy::Good { sequence, .. } => *sequence,
            _ => 0,
        };
        let newer = u8::from(sequence(&copies[1]) > sequence(&copies[0]));
        let usable = !copies.iter().all(|c| *c == Copy::Torn);
        let [first, second] = copies;
        if let Copy::Good { sequence, states } = if newer == 1 { second } else { first } {
            let mut loaded = Page { sequence, copy: newer, ..Page::default() };
            loaded.states.copy_from_slice(&states);
            self.pages[page] = Some(Box::new(loaded));
        }
        usable
    }

    pub(super) fn state(&self, block: u64) -> State {
        let (page, at) = place(block);
        self.pages[page].as_ref().map_or(State::Base, |p| state_in(&p.states, at))
    }

    /// The state of `blocks.start` and how far it goes, within `blocks`, which is not empty.
    pub(super) fn run(&self, blocks: Range<u64>) -> (State, u64) {
        let state = self.state(blocks.start);
        let whole = state as u8 * 0x55;
        let mut block = blocks.start + 1;
        while block < blocks.end {
            let (page, at) = place(block);
            let Some(states) = self.pages[page].as_ref().map(|p| &p.states) else {
                if state != State::Base {
                    break;
                }
                block = (page as u64 + 1) * PER_PAGE;
                continue;
            };
            if at % 4 == 0 && states[at / 4] == whole {
                block += 4;
            } else if state_in(states, at) == state {
                block += 1;
            } else {
                break;
            }
        }
        (state, block.min(blocks.end))
    }

    /// There is something to sync.
    pub(super) fn touch(&mut self) {
        self.unsynced = true;
    }

    pub(super) fn set(&mut self, blocks: Range<u64>, state: State) {
        self.unsynced = true;
        for block in blocks {
            let (page, at) = place(block);
            if self.pages[page].is_none() && state == State::Base {
                continue;
            }
            let states = &mut self.pages[page].get_or_insert_default().states;
            if state_in(states, at) != state {
                let shift = (at % 4) * 2;
                states[at / 4] = states[at / 4] & !(3 << shift) | (state as u8) << shift;
                self.dirty.insert(page);
            }
        }
    }

    /// Blocks in the overlay, and blocks that are zeroes.
    pub(super) fn count(&self) -> (u64, u64) {
        let bytes = self.pages.iter().flatten().flat_map(|page| page.states);
        bytes.fold((0, 0), |(data, zero), byte| {
            (data + u64::from((byte & 0x55).count_ones()), zero + u64::from((byte & 0xaa).count_ones()))
        })
    }

    /// What must reach the disk to make durable all that was set so far; `None`: nothing was written. What is set from
    /// now on is for the next time.
    pub(super) fn take(&mut self) -> Option<Vec<Image>> {
        if !std::mem::take(&mut self.unsynced) {
            return None;
        }
        let dirty = std::mem::take(&mut self.dirty);
        let image = |index: usize| {
            let page = self.pages[index].as_ref()?;
            let sequence = page.sequence + 1;
            let bytes = format::encode_page(index, sequence, &page.states);
            Some(Image { page: index, copy: 1 - page.copy, sequence, bytes })
        };
        Some(dirty.into_iter().filter_map(image).collect())
    }

    /// They are durable.
    pub(super) fn done(&mut self, images: &[Image]) {
        for image in images {
            if let Some(page) = &mut self.pages[image.page] {
                (page.sequence, page.copy) = (image.sequence, image.copy);
            }
        }
    }

    /// They may not be: the next flush writes them again, over the same copies.
    pub(super) fn put_back(&mut self, images: &[Image]) {
        self.unsynced = true;
        self.dirty.extend(images.iter().map(|image| image.page));
    }
}

fn place(block: u64) -> (usize, usize) {
    ((block / PER_PAGE) as usize, (block % PER_PAGE) as usize)
}

fn state_in(states: &[u8; STATES], at: usize) -> State {
    match states[at / 4] >> ((at % 4) * 2) & 3 {
        1 => State::Data,
        2 => State::Zero,
        _ => State::Base,
    }
}

/// The two copies of a page out of their bytes.
pub(super) fn copies(page: usize, bytes: &[u8]) -> [Copy; 2] {
    [format::decode_page(page, &bytes[..PAGE]), format::decode_page(page, &bytes[PAGE..])]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_the_state_changes() {
        let mut map = Map::new(3);
        let all = 0..3 * PER_PAGE;
        assert_eq!(map.run(all.clone()), (State::Base, all.end));
        map.set(5..PER_PAGE + 9, State::Data);
        map.set(7..8, State::Zero);
        assert_eq!(map.run(all.clone()), (State::Base, 5));
        assert_eq!(map.run(5..all.end), (State::Data, 7));
        assert_eq!(map.run(7..all.end), (State::Zero, 8));
        assert_eq!(map.run(8..all.end), (State::Data, PER_PAGE + 9));
        assert_eq!(map.run(8..100), (State::Data, 100));
        assert_eq!(map.run(PER_PAGE + 9..all.end), (State::Base, all.end));
        assert_eq!(map.count(), (PER_PAGE + 3, 1));
    }

    #[test]
    fn a_flush_writes_what_changed_over_the_older_copy() {
        let mut map = Map::new(2);
        assert!(map.take().is_none());
        map.set(0..1, State::Data);
        let first = map.take().unwrap();
        assert_eq!((first.len(), first[0].copy, first[0].sequence), (1, 0, 1));
        // It failed: the same place again, with what was set since.
        map.put_back(&first);
        map.set(PER_PAGE..PER_PAGE + 1, State::Zero);
        let second = map.take().unwrap();
        assert_eq!(second.iter().map(|i| (i.page, i.copy)).collect::<Vec<_>>(), [(0, 0), (1, 0)]);
        map.done(&second);
        // Data in place needs a sync but no page.
        map.set(0..1, State::Data);
        assert!(map.take().unwrap().is_empty());
        map.set(0..1, State::Zero);
        let third = map.take().unwrap();
        assert_eq!((third[0].page, third[0].copy, third[0].sequence), (0, 1, 2));
    }

    #[test]
    fn the_newer_whole_copy_counts_and_two_torn_ones_are_refused() {
        let good = |sequence, byte| Copy::Good { sequence, states: vec![byte; STATES].into() };
        let mut map = Map::new(1);
        assert!(map.load(0, [good(4, 0x55), good(5, 0xaa)]));
        assert_eq!(map.state(0), State::Zero);
        assert!(map.load(0, [good(6, 0x55), Copy::Torn]));
        assert_eq!(map.state(0), State::Data);
        map.set(0..1, State::Zero);
        assert_eq!(map.take().unwrap()[0].copy, 1, "the torn one is written next");
        assert!(Map::new(1).load(0, [Copy::Torn, Copy::Empty]));
        assert!(!Map::new(1).load(0, [Copy::Torn, Copy::Torn]));
    }
}
