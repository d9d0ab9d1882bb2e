//! Checks for Ctrl-C during long work.

use crate::error::Result;
use std::time::{Duration, Instant};

/// A function that returns an error if the user wants to stop. The error ends the work.
pub type Interrupt<'a> = &'a mut dyn FnMut() -> Result<()>;

/// The minimum time between two checks. Each check acquires Python's global interpreter lock, which takes time.
const INTERVAL: Duration = Duration::from_millis(100);

/// Wraps `check_interrupt`, so that it runs at most once per [`INTERVAL`] even if it is called for every item.
pub fn throttled(check_interrupt: Interrupt<'_>) -> impl FnMut() -> Result<()> + '_ {
    let mut last = Instant::now();
    move || match last.elapsed() < INTERVAL {
        true => Ok(()),
        false => {
            last = Instant::now();
            check_interrupt()
        }
    }
}

/// Runs `work` on an iterator over the items, which checks for an interrupt before each item. On an interrupt, the
/// iterator ends and the function returns the interrupt's error.
pub fn interruptible<I: IntoIterator, T>(
    check_interrupt: Interrupt,
    items: I,
    work: impl FnOnce(&mut dyn Iterator<Item = I::Item>) -> T,
) -> Result<T> {
    let mut status = Ok(());
    let output = work(&mut items.into_iter().take_while(|_| {
        status = check_interrupt();
        status.is_ok()
    }));
    status.map(|()| output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_wish_to_stop_ends_the_items() {
        let mut checks = 0;
        let mut check_interrupt = || {
            checks += 1;
            if checks < 3 {
                Ok(())
            } else {
                Err(Error::Interrupted("stop".into()))
            }
        };
        let mut seen = Vec::new();
        let stopped = interruptible(&mut check_interrupt, 0..10, |items| seen.extend(items));
        assert!(matches!(stopped, Err(Error::Interrupted(_))));
        assert_eq!(seen, [0, 1]);
        assert_eq!(interruptible(&mut || Ok(()), 0..4, |items| items.sum::<i32>()).unwrap(), 6);
    }

    #[test]
    fn checks_are_at_least_an_interval_apart() {
        let mut checks = 0;
        let mut check_interrupt = || {
            checks += 1;
            Ok(())
        };
        let start = Instant::now();
        let mut check = throttled(&mut check_interrupt);
        while start.elapsed() < 3 * INTERVAL {
            check().unwrap();
        }
        drop(check);
        assert!((1..=3).contains(&checks), "{checks}");
    }
}
