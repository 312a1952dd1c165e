//! What the fuzz targets run. The tests of `hearth-vmm` run the same over the corpus and over random input.

pub mod fault;
pub mod nbd;
pub mod overlay;
