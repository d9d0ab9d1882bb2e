//! How often each operator ran its kernel and how often its composed formula, so that tests can assert which.

use std::sync::atomic::{AtomicU64, Ordering};

/// Calls of one operator.
pub struct Count {
    pub operator: &'static str,
    kernel: AtomicU64,
    composed: AtomicU64,
}

impl Count {
    pub const fn new(operator: &'static str) -> Self {
        Count { operator, kernel: AtomicU64::new(0), composed: AtomicU64::new(0) }
    }

    pub fn kernel(&self) {
        self.kernel.fetch_add(1, Ordering::Relaxed);
    }

    pub fn composed(&self) {
        self.composed.fetch_add(1, Ordering::Relaxed);
    }

    /// (kernel calls, composed calls) since the start.
    pub fn read(&self) -> (u64, u64) {
        (self.kernel.load(Ordering::Relaxed), self.composed.load(Ordering::Relaxed))
    }
}
