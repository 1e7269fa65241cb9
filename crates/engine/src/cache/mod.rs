//! The memory of the cache: page ids and the slabs behind them.

pub mod pages;
