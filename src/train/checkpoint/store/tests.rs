//! Tests of a run's checkpoints with failures, kills, readers and pruning.

use std::process::Command;

use super::super::testing::checkpoint;
use super::super::{average, load};
use super::*;
use crate::atomic::fault::{arm, Fault};
use crate::testing::Scratch;

/// The environment variable that passes the run's folder to the process that is killed.
const RUN: &str = "NORMFORMER_RS_KILL_TEST_RUN";

/// Creates a run that has saved updates 1 and 2. Update 1 is the best, update 2 the last.
fn run(name: &str) -> (Scratch, CheckpointStore) {
    let dir = Scratch::new(name);
    let store = CheckpointStore::open(&dir.0).unwrap();
    for update in [1, 2] {
        store.save(update, &checkpoint(update), if update == 1 { Best::This } else { Best::Named(None) }).unwrap();
    }
    (dir, store)
}

/// Saves and prunes as a trainer does after an evaluation.
fn step(store: &CheckpointStore) -> Result<()> {
    store.save(3, &checkpoint(3), Best::This)?;
    store.prune(1)
}

/// Returns the number of system calls in a step at which a fault can be injected.
fn places() -> usize {
    let (_dir, store) = run("store-count");
    let armed = arm(Fault::Count);
    step(&store).unwrap();
    armed.passed()
}

/// Checks that both links lead to complete checkpoints, old or new, and that the run can continue.
fn check(dir: &Scratch, place: usize) {
    let [last, best] = [("last", 2), ("best", 1)].map(|(link, old)| {
        let found = load(CheckpointStore::at(&dir.0).resolve(link).unwrap()).unwrap();
        assert!(found == checkpoint(old) || found == checkpoint(3), "{link} at place {place}: {:?}", found.state);
        found
    });
    // The checkpoint was saved as best and last at once, so either both links lead to it or none does.
    assert_eq!(last == checkpoint(3), best == checkpoint(3), "place {place}");
    let store = CheckpointStore::open(&dir.0).unwrap();
    for (name, found) in [("last", last), ("best", best)] {
        assert_eq!(load(store.folder.join(name)).unwrap(), found, "the link {name} is made at place {place}");
    }
    for update in store.list().unwrap() {
        assert_eq!(load(store.resolve(&update.to_string()).unwrap()).unwrap(), checkpoint(update), "place {place}");
    }
    step(&store).unwrap();
    assert_eq!(load(store.resolve("last").unwrap()).unwrap(), checkpoint(3));
    let names = fs::read_dir(&store.folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert!(names.len() == 3 && names[2].starts_with("update-00000003"), "place {place}: {names:?}");
}

#[test]
fn a_full_disk_at_any_place_leaves_the_old_or_the_new() {
    // The k-th system call fails because the disk is full.
    for k in 1..=places() {
        let (dir, store) = run("store-enospc");
        let armed = arm(Fault::Enospc(k));
        let error = step(&store).unwrap_err();
        drop(armed);
        let text = error.to_string();
        assert!(text.contains("No space left on device") && text.contains("/checkpoints/"), "{text}");
        // Old checkpoints are removed last, when the new one is already in use.
        assert!(text.contains("the previous checkpoint is untouched") || store.last() == (3, 1), "{text}");
        let hidden = fs::read_dir(&store.folder).unwrap().filter(|e| is_hidden(e.as_ref().unwrap())).count();
        assert!(hidden == 0 || store.last() == (3, 1), "place {k} left something: {text}");
        check(&dir, k);
    }
}

#[test]
fn a_first_checkpoint_is_there_to_resume_or_is_not() {
    // True if some failed save has left no checkpoint, and if some has left one.
    let mut has_been = [false; 2];
    for k in 1.. {
        let dir = Scratch::new("store-first");
        let store = CheckpointStore::open(&dir.0).unwrap();
        let armed = arm(Fault::Enospc(k));
        let done = step(&store);
        drop(armed);
        // A kill may leave the checkpoint complete but without its links.
        let store = CheckpointStore::open(&dir.0).unwrap();
        let found = store.newest().unwrap();
        has_been[usize::from(found.is_some())] |= done.is_err();
        if let Some(found) = found {
            assert_eq!(found.checkpoint, checkpoint(3), "place {k}");
            // The checkpoint was the best, and remains so if later ones are not better.
            for update in 4..8 {
                store.save(update, &checkpoint(update), Best::Named(None)).unwrap();
                store.prune(1).unwrap();
            }
            assert_eq!(load(store.resolve("best").unwrap()).unwrap(), checkpoint(3), "place {k}");
        }
        if done.is_ok() {
            break;
        }
    }
    assert_eq!(has_been, [true; 2]);
}

#[test]
fn a_first_save_that_fails_speaks_of_no_previous_checkpoint() {
    let dir = Scratch::new("store-none");
    let store = CheckpointStore::open(&dir.0).unwrap();
    let armed = arm(Fault::Enospc(2));
    let text = store.save(1, &checkpoint(1), Best::This).unwrap_err().to_string();
    drop(armed);
    assert!(text.contains("no checkpoint had been saved yet") && !text.contains("untouched"), "{text}");
}

#[test]
fn the_newest_whole_checkpoint_is_found() {
    let (dir, store) = run("store-newest");
    store.save(3, &checkpoint(3), Best::Named(None)).unwrap();
    let newest = || store.newest().map(|found| found.map(|found| (found.checkpoint, found.passed)));
    assert_eq!(newest().unwrap().unwrap(), (checkpoint(3), vec![]));
    let damage = |update: u64| {
        let path = dir.0.join(format!("checkpoints/update-{update:08}/model.safetensors"));
        fs::write(&path, fs::read(&path).unwrap().split_last().unwrap().1).unwrap();
    };
    damage(3);
    let (found, passed) = newest().unwrap().unwrap();
    assert_eq!(found, checkpoint(2));
    assert!(passed.len() == 1 && passed[0].contains("update-00000003/model.safetensors is damaged"), "{passed:?}");
    fs::write(dir.0.join("checkpoints/update-00000003/state.json"), "{").unwrap();
    let (found, passed) = newest().unwrap().unwrap();
    assert_eq!(found, checkpoint(2));
    assert!(passed.len() == 1 && passed[0].contains("update-00000003/state.json is damaged"), "{passed:?}");
    fs::remove_dir_all(dir.0.join("checkpoints/update-00000003")).unwrap();
    let (found, passed) = newest().unwrap().unwrap();
    assert_eq!(found, checkpoint(2));
    assert!(passed.len() == 1 && passed[0].contains("update-00000003 is missing"), "{passed:?}");
    assert_eq!(store.chosen("1").unwrap().checkpoint, checkpoint(1));
    assert_eq!(store.chosen("best").unwrap().checkpoint, checkpoint(1));
    assert_eq!(store.chosen("update-00000002").unwrap().checkpoint, checkpoint(2));
    for strange in ["7", "bst", dir.0.to_str().unwrap()] {
        assert!(store.chosen(strange).err().unwrap().to_string().contains("there is no checkpoint"), "{strange}");
    }
    damage(2);
    damage(1);
    let error = newest().unwrap_err().to_string();
    assert!(error.contains("no checkpoint up to the last can be read") && error.contains("--overwrite"), "{error}");
}

#[test]
fn a_later_versions_checkpoint_is_not_passed_over() {
    let (dir, store) = run("store-later");
    let path = dir.0.join("checkpoints/update-00000002/state.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"format_version\": 1", "\"format_version\": 2")).unwrap();
    assert!(store.newest().err().unwrap().to_string().contains("upgrade normformer_rs"));
}

/// True if the entry's name begins with a dot, as the names of unfinished files do.
fn is_hidden(entry: &fs::DirEntry) -> bool {
    entry.file_name().to_string_lossy().starts_with('.')
}

#[test]
fn a_kill_at_any_place_leaves_the_old_or_the_new() {
    use std::os::unix::process::ExitStatusExt;
    let test = module_path!().split_once("::").unwrap().1.to_string() + "::child";
    let places = places();
    for k in 1..=places + 1 {
        let (dir, _store) = run("store-kill");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", &test, "--ignored"]).env(RUN, &dir.0).env(fault::VARIABLE, format!("kill:{k}"));
        let output = child.output().unwrap();
        let killed = if k <= places { Some(libc::SIGKILL) } else { None };
        assert_eq!(output.status.signal(), killed, "place {k}: {output:?}");
        assert!(k <= places || output.status.success() && CheckpointStore::at(&dir.0).last() == (3, 1), "{output:?}");
        check(&dir, k);
    }
}

#[test]
#[ignore = "the process that the kill test kills"]
fn child() {
    if let Some(dir) = std::env::var_os(RUN) {
        step(&CheckpointStore::at(dir)).unwrap();
    }
}

#[test]
fn a_reader_finds_a_whole_checkpoint_while_the_links_move() {
    let (dir, store) = run("store-reader");
    std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            for update in 3..60 {
                store.save(update, &checkpoint(update), Best::This).unwrap();
                store.prune(0).unwrap();
            }
        });
        let reader = CheckpointStore::at(&dir.0);
        while !writer.is_finished() {
            let by_link = load(dir.0.join("checkpoints/last")).unwrap();
            let (_, by_name) = reader.read("best", |path| load(path)).unwrap();
            for found in [by_link, by_name] {
                assert_eq!(found, checkpoint(found.state["update"].as_u64().unwrap()));
            }
        }
    });
}

#[test]
fn names_numbers_links_and_paths_resolve() {
    let (dir, store) = run("store-resolve");
    let second = fs::canonicalize(dir.0.join("checkpoints/update-00000002")).unwrap();
    for what in ["last", "2", "update-2", "update-00000002", second.to_str().unwrap()] {
        assert_eq!(store.resolve(what).unwrap(), second, "{what}");
    }
    assert_eq!(load(&dir.0).unwrap(), checkpoint(1), "a run's folder is its best");
    assert_eq!(fs::read_link(dir.0.join("checkpoints/last")).unwrap(), Path::new("update-00000002"));
    for what in ["3", "update-00000003", "update-x"] {
        let error = store.resolve(what).unwrap_err().to_string();
        assert!(error.contains("has update-00000001, update-00000002, best, last"), "{error}");
    }
    assert!(store.resolve("lst").unwrap_err().to_string().contains("there is no checkpoint \"lst\""));
    assert!(CheckpointStore::at(dir.0.join("none"))
        .resolve("last")
        .unwrap_err()
        .to_string()
        .contains("has no checkpoint"));
}

#[test]
fn pruning_keeps_the_newest_and_what_is_linked() {
    let (_dir, store) = run("store-prune");
    for update in [30, 4, 5, 6] {
        store.save(update, &checkpoint(update), Best::Named(None)).unwrap();
    }
    store.prune(2).unwrap();
    assert_eq!(store.list().unwrap(), [1, 5, 6, 30], "best, the two newest up to last, and what lies after last");
    let recent: Vec<_> = [6, 5].map(|u| store.folder.join(name_of((u, 1)))).into();
    assert_eq!(store.recent(2).unwrap(), recent);
    assert_eq!(average(&recent, &mut || Ok(())).unwrap().state["update"], 6);
    store.prune(0).unwrap();
    assert_eq!(store.list().unwrap(), [1, 6, 30]);
}

#[test]
fn an_update_saved_again_does_not_touch_the_first() {
    let (dir, store) = run("store-again");
    let first = load(store.resolve("2").unwrap()).unwrap();
    let again = store.save(2, &checkpoint(7), Best::Named(None)).unwrap();
    assert_eq!(again, "update-00000002-2");
    assert_eq!(load(dir.0.join("checkpoints/update-00000002")).unwrap(), first);
    for what in ["last", "2"] {
        assert_eq!(load(store.resolve(what).unwrap()).unwrap(), checkpoint(7));
    }
    store.prune(1).unwrap();
    assert!(!dir.0.join("checkpoints/update-00000002").exists());
    assert_eq!(store.list().unwrap(), [1, 2]);
}

/// Copies the folder as `cp -rL`, zip and object stores do: a link becomes a copy of the checkpoint that it leads to.
fn follow_links(store: &CheckpointStore) {
    for name in NAMES {
        let path = store.folder.join(name);
        let Ok(target) = fs::canonicalize(&path) else { continue };
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        for entry in fs::read_dir(target).unwrap().flatten() {
            fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
        }
    }
}

#[test]
fn a_copy_with_links_followed_or_lost_goes_on() {
    for harm in ["followed", "lost"] {
        let (dir, store) = run(&format!("store-copy-{harm}"));
        match harm {
            "followed" => follow_links(&store),
            _ => NAMES.iter().for_each(|name| fs::remove_file(store.folder.join(name)).unwrap()),
        }
        let named = |name| CheckpointStore::at(&dir.0).resolve(name).map(|path| load(path).unwrap()).unwrap();
        assert_eq!([named("best"), named("last")], [checkpoint(1), checkpoint(2)]);
        assert_eq!(CheckpointStore::at(&dir.0).chosen("best").unwrap().checkpoint, checkpoint(1));
        let store = CheckpointStore::open(&dir.0).unwrap();
        assert_eq!(store.newest().unwrap().unwrap().checkpoint, checkpoint(2), "{harm}");
        for update in [3, 4] {
            store.save(update, &checkpoint(update), Best::Named(None)).unwrap();
            store.prune(1).unwrap();
        }
        assert_eq!(store.list().unwrap(), [1, 4], "{harm}");
        for name in NAMES {
            assert!(store.folder.join(name).is_symlink(), "{harm}: {name} is a link again");
        }
    }
}

/// The copy is the only complete one, because the checkpoint's own folder is damaged or missing. It is kept under
/// another name.
#[test]
fn a_copy_in_a_links_place_that_stands_nowhere_else_is_kept() {
    let (dir, store) = run("store-only-copy");
    follow_links(&store);
    fs::write(store.folder.join("update-00000001/model.safetensors"), "damaged").unwrap();
    assert_eq!(load(CheckpointStore::at(&dir.0).resolve("best").unwrap()).unwrap(), checkpoint(1));
    let store = CheckpointStore::open(&dir.0).unwrap();
    for update in 3..7 {
        store.save(update, &checkpoint(update), Best::Named(None)).unwrap();
        store.prune(1).unwrap();
    }
    assert_eq!(load(store.resolve("best").unwrap()).unwrap(), checkpoint(1));
    assert_eq!(load(store.folder.join("update-00000001")).unwrap(), checkpoint(1));
}

/// If the best checkpoint is damaged, the best one before it counts as the best.
#[test]
fn a_damaged_best_gives_way_to_the_one_before() {
    let (_dir, store) = run("store-damaged-best");
    store.save(3, &checkpoint(3), Best::This).unwrap();
    fs::write(store.folder.join("update-00000003/model.safetensors"), "short").unwrap();
    for update in 4..7 {
        store.save(update, &checkpoint(update), Best::Named(Some("update-00000003"))).unwrap();
        store.prune(1).unwrap();
    }
    assert_eq!(load(store.resolve("best").unwrap()).unwrap(), checkpoint(1));
}

/// If a run went back to an earlier checkpoint, the best is the one on the branch that it continued.
#[test]
fn the_best_is_the_one_that_the_run_names() {
    let (_dir, store) = run("store-branch");
    store.save(9, &checkpoint(9), Best::This).unwrap();
    let found = store.chosen("2").unwrap();
    assert_eq!(found.best.as_deref(), Some("update-00000001"));
    store.save(3, &checkpoint(3), Best::Named(found.best.as_deref())).unwrap();
    assert_eq!(load(store.resolve("best").unwrap()).unwrap(), checkpoint(1));
}

#[test]
fn a_strangers_folders_are_neither_removed_nor_written_over() {
    let (dir, store) = run("store-strangers");
    let stranger = store.folder.join("update-00000000");
    fs::create_dir(&stranger).unwrap();
    fs::write(stranger.join(STATE), "{\"kind\": \"somebody's\"}").unwrap();
    let best = store.folder.join("best");
    fs::remove_file(&best).unwrap();
    fs::create_dir(&best).unwrap();
    fs::write(best.join("thesis.txt"), "mine").unwrap();
    store.prune(0).unwrap();
    store.discard(&stranger).unwrap();
    let said = store.save(3, &checkpoint(3), Best::This).unwrap_err().to_string();
    assert!(said.contains("best is neither a run's link nor a checkpoint: move it away"), "{said}");
    store.clear().unwrap();
    assert_eq!(store.list().unwrap(), [0], "what nobody can prove to be a run's");
    assert_eq!(fs::read(best.join("thesis.txt")).unwrap(), b"mine");
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1);
}

#[test]
fn checkpoints_may_lie_on_another_disk() {
    let (disk, dir) = (Scratch::new("store-disk"), Scratch::new("store-linked"));
    std::os::unix::fs::symlink(&disk.0, dir.0.join(CHECKPOINTS)).unwrap();
    for _ in 0..2 {
        let store = CheckpointStore::open(&dir.0).unwrap();
        store.save(1, &checkpoint(1), Best::This).unwrap();
        step(&store).unwrap();
        assert_eq!(load(&dir.0).unwrap(), checkpoint(3));
        store.clear().unwrap();
        assert!(dir.0.join(CHECKPOINTS).is_symlink());
        assert_eq!(fs::read_dir(&disk.0).unwrap().count(), 0);
    }
}
