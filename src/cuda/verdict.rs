//! Verdicts on kernel variants on a device: a variant is unknown, right, or wrong.
//!
//! A variant is launched only after its results have been compared with the formula's. The first launch of an unknown
//! variant is refused. Then `operator/proof.rs` runs the variant on test data, reports the verdict here, and repeats
//! the call. Verdicts are kept in a file beside the compiled kernel. Each line has the device and driver, program,
//! options, kernel, and verdict.

use super::cache;
use crate::atomic;
use crate::error::{Error, Result};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};

/// One variant of a kernel, on one device.
pub struct Variant {
    /// A line of the file without the verdict: device and driver, program, options, and kernel.
    line: String,
    /// The file with the verdicts on this compiled program.
    file: Option<PathBuf>,
    verdict: AtomicU8,
}

/// The reason for which a launch was refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Refusal {
    /// No proof has compared the variant yet.
    Unknown,
    /// A proof has found the variant wrong.
    Wrong,
}

/// The outcome of a variant's proof.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    Right,
    /// The results were wrong; the variant stays off on this device and driver.
    Wrong,
    /// The results could not be compared, for example for lack of memory. The variant is off in this process, but no
    /// verdict is kept in the file.
    Off,
}

// The states of a variant. WRONG stands for `Verdict::Off` too, because neither kind may be launched.
const UNKNOWN: u8 = 0;
const RIGHT: u8 = 1;
const WRONG: u8 = 2;

thread_local! {
    /// The reason for the last refusal on this thread, which [`admitted`] returns.
    static REFUSED: Cell<Option<Refusal>> = const { Cell::new(None) };
    /// The variants that the running proof has launched; `None` without a proof. During a proof no launch is refused.
    static LAUNCHED: RefCell<Option<Vec<&'static Variant>>> = const { RefCell::new(None) };
}

impl Variant {
    /// Returns the variant on a device, with the verdict that its file has. `device` is the name of device and driver,
    /// `names` are the program, the options and the kernel, and `binary` is the file of the compiled program.
    pub fn new(device: String, names: [&str; 3], binary: Option<PathBuf>, is_trusted: bool) -> Self {
        let file = binary.map(|file| file.with_extension("verdicts"));
        let line = format!("{device}\t{}", names.join("\t"));
        // A trusted variant counts as right, whatever the file says.
        let verdict = match (is_trusted, file.as_ref().and_then(|file| read(file, &line))) {
            (true, _) | (_, Some(true)) => RIGHT,
            (_, Some(false)) => WRONG,
            (_, None) => UNKNOWN,
        };
        Variant { line, file, verdict: AtomicU8::new(verdict) }
    }

    /// Allows a launch, or refuses it: records the reason for [`admitted`], and returns an error.
    pub fn admit(&'static self) -> Result<()> {
        // During a proof the launch is recorded and always allowed.
        let is_proof = LAUNCHED.with_borrow_mut(|launched| launched.as_mut().map(|all| all.push(self)).is_some());
        if is_proof {
            return Ok(());
        }
        let refusal = match self.verdict.load(Ordering::Acquire) {
            RIGHT => return Ok(()),
            UNKNOWN => Refusal::Unknown,
            _ => Refusal::Wrong,
        };
        REFUSED.set(Some(refusal));
        Err(Error::Torch(format!("the CUDA kernel is {refusal:?}: {}", self.name())))
    }

    /// Records a verdict here and in the variant's file, unless the variant already has one.
    fn judge(&self, verdict: Verdict) {
        let (state, word) = match verdict {
            Verdict::Right => (RIGHT, Some("right")),
            Verdict::Wrong => (WRONG, Some("wrong")),
            Verdict::Off => (WRONG, None),
        };
        let was_unknown = self.verdict.compare_exchange(UNKNOWN, state, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if let (true, Some(file), Some(word)) = (was_unknown, &self.file, word) {
            let line = format!("{}\t{word}\n", self.line);
            // A failure to write is ignored: the next process then proves the variant again. One call writes the whole
            // line, so that lines from several processes do not mix.
            let _ = appended(file).map(|mut f| f.write_all(line.as_bytes()));
        }
    }

    /// Returns a name of the variant for messages: "rows_forward of layer_norm.cu (-DK_VEC=4 …) on …".
    pub fn name(&self) -> String {
        match self.line.split('\t').collect::<Vec<_>>()[..] {
            [device, program, options, kernel] => format!("{kernel} of {program} ({options}) on {device}"),
            _ => self.line.clone(),
        }
    }
}

/// Runs a call's kernels with `run`. Returns the result of `run`, or the reason for which a launch was refused.
pub fn admitted(run: impl FnOnce() -> Result<()>) -> std::result::Result<Result<()>, Refusal> {
    REFUSED.set(None);
    let result = run();
    match REFUSED.take() {
        Some(refusal) if result.is_err() => Err(refusal),
        _ => Ok(result),
    }
}

/// Runs kernels with `run`, unknown variants included. Returns the result of `run`, and the variants that it launched.
pub fn launched<T>(run: impl FnOnce() -> T) -> (T, Vec<&'static Variant>) {
    /// Restores the outer record when dropped, even after a panic: otherwise the thread would allow every launch.
    struct Outside(Option<Vec<&'static Variant>>);
    impl Drop for Outside {
        fn drop(&mut self) {
            LAUNCHED.set(self.0.take());
        }
    }
    let _outside = Outside(LAUNCHED.replace(Some(Vec::new())));
    let result = run();
    (result, LAUNCHED.take().unwrap_or_default())
}

/// True if this thread runs kernels in [`launched`], where unknown variants are allowed.
pub fn is_proof() -> bool {
    LAUNCHED.with_borrow(Option::is_some)
}

/// Records the verdict on these variants; a variant that already has a verdict keeps it.
pub fn judge(variants: &[&'static Variant], verdict: Verdict) {
    variants.iter().for_each(|variant| variant.judge(verdict));
}

/// Returns the variants that have no verdict yet.
pub fn unknown(variants: &[&'static Variant]) -> Vec<&'static Variant> {
    variants.iter().copied().filter(|v| v.verdict.load(Ordering::Acquire) == UNKNOWN).collect()
}

/// Opens the file of verdicts for appending. A file that is not trusted is replaced.
fn appended(path: &Path) -> Result<File> {
    let open = || atomic::open_own(path, File::options().append(true).create(true));
    open().or_else(|_| atomic::remove_file(path).and_then(|()| open()))
}

/// Returns all verdicts in the cache folder, one line each, including damaged lines.
pub fn kept() -> Vec<String> {
    let files = cache::folder().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let verdicts = files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|e| e == "verdicts"));
    let mut lines: Vec<String> = verdicts
        .filter_map(|path| text(&path))
        .flat_map(|text| text.lines().map(str::to_string).collect::<Vec<_>>())
        .collect();
    lines.sort();
    lines.dedup();
    lines
}

/// Returns a file's verdict on the variant with this line: true for right, `None` without a verdict. If the file has
/// lines with both verdicts, wrong counts.
fn read(file: &Path, line: &str) -> Option<bool> {
    let text = text(file)?;
    let verdicts = text.lines().filter_map(|file_line| file_line.strip_prefix(line)?.strip_prefix('\t'));
    let known = verdicts.filter(|verdict| ["right", "wrong"].contains(verdict));
    known.map(|verdict| verdict == "right").reduce(|all_right, is_right| all_right && is_right)
}

/// Returns a file's text, if the file exists and is trusted.
fn text(file: &Path) -> Option<String> {
    let bytes = cache::trusted(atomic::read_own(file, cache::BYTES))??;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an untrusted variant whose verdict is in the folder's file `a.verdicts`.
    fn variant(folder: &Path, kernel: &str) -> &'static Variant {
        let file = Some(folder.join("a.cubin"));
        Box::leak(Box::new(Variant::new("H100, driver 13.0".into(), ["p.cu", "-DK=1", kernel], file, false)))
    }

    #[test]
    fn a_verdict_is_kept_and_the_first_one_counts() {
        let folder = tempfile::tempdir().unwrap();
        let (good, bad) = (variant(folder.path(), "good"), variant(folder.path(), "bad"));
        assert_eq!(admitted(|| good.admit()).err(), Some(Refusal::Unknown));
        let (done, both) = launched(|| good.admit().and_then(|()| bad.admit()));
        done.unwrap();
        assert_eq!(unknown(&both).len(), 2);
        judge(&both[..1], Verdict::Right);
        judge(&both[1..], Verdict::Wrong);
        judge(&both, Verdict::Right);
        assert!(admitted(|| good.admit()).unwrap().is_ok());
        assert_eq!(admitted(|| bad.admit()).err(), Some(Refusal::Wrong));
        // New `Variant`s read the file, as those of another process would. The name "goo" is a part of "good", but has
        // no verdict.
        let (good, bad, other) =
            (variant(folder.path(), "good"), variant(folder.path(), "bad"), variant(folder.path(), "goo"));
        assert!(admitted(|| good.admit()).unwrap().is_ok());
        assert_eq!(admitted(|| bad.admit()).err(), Some(Refusal::Wrong));
        assert_eq!(admitted(|| other.admit()).err(), Some(Refusal::Unknown));
        let trusted = Variant::new("H100, driver 13.0".into(), ["p.cu", "-DK=1", "bad"], None, true);
        assert!(Box::leak(Box::new(trusted)).admit().is_ok());
        assert!(good.name().contains("good of p.cu (-DK=1) on H100"));
    }

    #[test]
    fn verdicts_that_others_may_have_written_are_proven_again() {
        use std::os::unix::fs::{symlink, PermissionsExt};
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.verdicts");
        let forged = || std::fs::write(&file, "H100, driver 13.0\tp.cu\t-DK=1\tkernel\tright\n").unwrap();
        let refusal = || admitted(|| variant(folder.path(), "kernel").admit()).err();
        forged();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        assert_eq!(refusal(), None);
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o646)).unwrap();
        assert_eq!(refusal(), Some(Refusal::Unknown));
        judge(&[variant(folder.path(), "kernel")], Verdict::Wrong);
        assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 1, "a new file took its place");
        assert_eq!(refusal(), Some(Refusal::Wrong));
        std::fs::rename(&file, folder.path().join("elsewhere")).unwrap();
        symlink("elsewhere", &file).unwrap();
        assert_eq!(refusal(), Some(Refusal::Unknown));
    }

    #[test]
    fn what_could_not_be_compared_is_off_here_alone() {
        let folder = tempfile::tempdir().unwrap();
        let here = variant(folder.path(), "kernel");
        judge(&[here], Verdict::Off);
        assert_eq!(admitted(|| here.admit()).err(), Some(Refusal::Wrong));
        let there = variant(folder.path(), "kernel");
        assert_eq!(admitted(|| there.admit()).err(), Some(Refusal::Unknown));
    }

    #[test]
    fn a_panic_ends_a_proof() {
        let panicked = std::panic::catch_unwind(|| launched(|| panic!("in a proof")));
        assert!(panicked.is_err() && !is_proof());
    }

    #[test]
    fn other_errors_are_no_refusals() {
        let failed = admitted(|| Err(Error::Torch("no memory".into())));
        assert!(failed.unwrap().unwrap_err().to_string().contains("no memory"));
    }
}
