//! Long work that asks now and then whether to go on, so that Ctrl-C is heard in it.

use crate::error::Result;
use std::time::{Duration, Instant};

/// Asks whether to go on; its error ends the work.
pub type Between<'a> = &'a mut dyn FnMut() -> Result<()>;

/// A wish to stop is heard within a second; asking takes Python's lock.
const INTERVAL: Duration = Duration::from_millis(100);

/// `between`, asked at most once per [`INTERVAL`], for callers that ask at every item.
pub fn seldom(between: Between<'_>) -> impl FnMut() -> Result<()> + '_ {
    let mut last = Instant::now();
    move || match last.elapsed() < INTERVAL {
        true => Ok(()),
        false => {
            last = Instant::now();
            between()
        }
    }
}

/// Hands items to `work` and asks before each. A wish to stop ends the items, and its error is returned.
pub fn listening<I: IntoIterator, T>(
    between: Between,
    items: I,
    work: impl FnOnce(&mut dyn Iterator<Item = I::Item>) -> T,
) -> Result<T> {
    let mut heard = Ok(());
    let done = work(&mut items.into_iter().take_while(|_| {
        heard = between();
        heard.is_ok()
    }));
    heard.map(|()| done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_wish_to_stop_ends_the_items() {
        let mut asked = 0;
        let mut between = || {
            asked += 1;
            if asked < 3 {
                Ok(())
            } else {
                Err(Error::Interrupted("stop".into()))
            }
        };
        let mut seen = Vec::new();
        let stopped = listening(&mut between, 0..10, |items| seen.extend(items));
        assert!(matches!(stopped, Err(Error::Interrupted(_))));
        assert_eq!(seen, [0, 1]);
        assert_eq!(listening(&mut || Ok(()), 0..4, |items| items.sum::<i32>()).unwrap(), 6);
    }

    #[test]
    fn a_question_waits_for_the_interval() {
        let mut asked = 0;
        let mut between = || {
            asked += 1;
            Ok(())
        };
        let start = Instant::now();
        let mut ask = seldom(&mut between);
        while start.elapsed() < 3 * INTERVAL {
            ask().unwrap();
        }
        drop(ask);
        assert!((1..=3).contains(&asked), "{asked}");
    }
}
