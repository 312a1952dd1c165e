//! Counted places: how many of something may be at once. A place is given back when it is dropped, so that no
//! way out of a task can keep one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Places of one sort.
#[derive(Debug)]
pub(crate) struct Places {
    taken: Arc<AtomicUsize>,
    limit: usize,
}

/// A place that is taken.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicUsize>);

impl Places {
    pub(crate) fn new(limit: usize) -> Self {
        Self { taken: Arc::default(), limit }
    }

    /// A place, unless all are taken.
    pub(crate) fn take(&self) -> Option<Place> {
        // The agent has one thread: nobody comes between the two.
        if self.taken.load(Ordering::Relaxed) >= self.limit {
            return None;
        }
        self.taken.fetch_add(1, Ordering::Relaxed);
        Some(Place(Arc::clone(&self.taken)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_comes_back_when_it_is_dropped() {
        let places = Places::new(2);
        let (first, second) = (places.take(), places.take());
        assert!(first.is_some() && second.is_some() && places.take().is_none());
        drop(first);
        assert!(places.take().is_some());
    }
}
