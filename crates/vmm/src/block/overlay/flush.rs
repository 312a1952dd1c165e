//! Makes an overlay durable: its data first, then the map pages that changed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::{StreamExt as _, TryStreamExt as _};

use super::Overlay;
use super::format::Header;
use super::map::Image;
use crate::block::backend::{BlockError, Limit};

/// Map pages written at once.
const PAGES_AT_ONCE: usize = 8;

/// Marks what a flush had taken as unwritten again, unless it came to its end.
struct Taken<'a> {
    overlay: &'a Overlay,
    images: Vec<Image>,
    durable: bool,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut map = self.overlay.map();
        if self.durable { map.done(&self.images) } else { map.put_back(&self.images) }
    }
}

impl Overlay {
    pub(super) async fn sync(&self, limit: &Limit) -> Result<(), BlockError> {
        if self.cow.read_only() {
            return Ok(());
        }
        let before = self.begun.load(Ordering::SeqCst);
        let lock = limit.bound(self.flushing.clone().lock_owned()).await?;
        if self.flushed.load(Ordering::SeqCst) > before {
            // One that began after this call has made all durable that this one was to.
            return Ok(());
        }
        let this = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        // A page that the kernel still writes for a flush that was given up must not be written by the next.
        let limit = &limit.holding(Arc::new(lock));
        let Some(images) = self.map().take() else {
            self.flushed.store(this, Ordering::SeqCst);
            return Ok(());
        };
        let mut taken = Taken { overlay: self, images, durable: false };
        self.cow.flush(limit).await?;
        if !taken.images.is_empty() {
            let writes = futures::stream::iter(taken.images.clone()).map(|image| async move {
                self.cow.write_at(Header::page_at(image.page, image.copy), image.bytes, limit).await
            });
            writes.buffer_unordered(PAGES_AT_ONCE).try_collect::<()>().await?;
            self.cow.flush(limit).await?;
        }
        taken.durable = true;
        drop(taken);
        self.flushed.store(this, Ordering::SeqCst);
        Ok(())
    }
}
