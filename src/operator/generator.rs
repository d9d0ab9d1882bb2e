//! A random number generator that no other code advances.

use super::ffi::shim_error;
use crate::error::Result;
use crate::host::CTensor;
use crate::init::RandomNumbers;
use std::ffi::c_void;
use std::ptr::NonNull;
use tch::Tensor;

extern "C" {
    fn nfrs_generator(seed: u64) -> *mut c_void;
    fn nfrs_free_generator(generator: *mut c_void);
    /// Fills a tensor as [`Generator::draw`] does; false means failure.
    fn nfrs_draw(generator: *mut c_void, t: *const CTensor, is_normal: bool, from: f64, to: f64) -> bool;
}

/// A CPU generator. It draws the same numbers as torch's default generator after `torch.manual_seed` with the same
/// seed, but no other thread of the process can advance it.
pub struct Generator(NonNull<c_void>);

impl Generator {
    /// Creates a generator with this seed.
    pub fn new(seed: u64) -> Result<Self> {
        // SAFETY: the function takes no pointer, and this value owns the one that is returned.
        NonNull::new(unsafe { nfrs_generator(seed) }).map(Generator).ok_or_else(shim_error)
    }

    /// Fills a tensor with uniform numbers from `from` to `to`, or with normal ones of mean `from` and standard
    /// deviation `to`.
    fn draw(&self, t: &Tensor, is_normal: bool, from: f64, to: f64) -> Result<()> {
        // SAFETY: the generator lives as long as `self`, the tensor as long as the call.
        match unsafe { nfrs_draw(self.0.as_ptr(), t.as_ptr().cast(), is_normal, from, to) } {
            true => Ok(()),
            false => Err(shim_error()),
        }
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        // SAFETY: nfrs_generator created it, and it is freed once.
        unsafe { nfrs_free_generator(self.0.as_ptr()) }
    }
}

impl RandomNumbers for Generator {
    /// Fills the tensor with normal numbers of mean 0 and standard deviation `std`.
    fn normal(&self, t: &Tensor, std: f64) -> Result<()> {
        let (is_normal, mean) = (true, 0.0);
        self.draw(t, is_normal, mean, std)
    }

    /// Fills the tensor with uniform numbers from −bound to bound.
    fn uniform(&self, t: &Tensor, bound: f64) -> Result<()> {
        let is_normal = false;
        self.draw(t, is_normal, -bound, bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn its_numbers_are_torchs_whoever_draws_meanwhile() {
        let empty = || Tensor::empty([3, 70], (Kind::Float, Device::Cpu));
        let drawn = |draw: &dyn RandomNumbers, between: &dyn Fn()| {
            let all = [empty(), empty(), empty()];
            draw.normal(&all[0], 0.3).unwrap();
            between();
            draw.uniform(&all[1], 2.0).unwrap();
            between();
            draw.normal(&all[2], 1.0).unwrap();
            Tensor::stack(&all, 0)
        };
        tch::manual_seed(17);
        let wanted = drawn(&crate::init::ProcessGenerator, &|| ());
        let found = drawn(&Generator::new(17).unwrap(), &|| drop(Tensor::randn([5], (Kind::Float, Device::Cpu))));
        assert!(found.equal(&wanted));
    }
}
