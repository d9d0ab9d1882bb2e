//! Helpers shared by the tests of several modules.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::{Kind, Tensor};

/// A temporary folder for one test, removed when it is dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// Creates an empty folder, with `name` and a number that no other test has in its path.
    pub fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("normformer_rs-{name}-{}-{n}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Asserts that a tensor of any type has the shape of `wanted`, which is f64, and that Σ|found − wanted| is at most
/// `bound`·(Σ|wanted| + `floor`). Messages call the tensor `what`.
pub fn assert_near(found: &Tensor, wanted: &Tensor, bound: f64, floor: f64, what: &str) {
    assert_eq!(found.size(), wanted.size(), "{what}");
    let sum = |t: Tensor| t.abs().sum(Kind::Double).double_value(&[]);
    let (error, size) = (sum(found.to_kind(Kind::Double) - wanted), sum(wanted.copy()));
    assert!(error <= bound * (size + floor), "{what}: off by {error}, of {size}");
}
