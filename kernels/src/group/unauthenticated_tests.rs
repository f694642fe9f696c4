//! Fear: that a process without the run's key takes part in a run, blocks it, or is not noticed.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use super::peers::Peers;
use super::tests::{SECONDS, place};
use super::*;

/// A port that no connection of another test takes before it is opened: Linux gives those from 32768 on.
pub(super) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let offset = std::process::id() * 8 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + u16::try_from(offset % 10_000).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn key() -> RunKey {
    RunKey::of("the secret of a run")
}

fn serve(key: &RunKey) -> KeyValueStore {
    KeyValueStore::serve("127.0.0.1", 0, "test/", key, SECONDS).unwrap()
}

fn keyed(rank: u32, world: u32, port: u16) -> RankAddress {
    RankAddress { key: key(), ..place(rank, world, port) }
}

/// Waits until the store has refused so many.
fn refused(store: &KeyValueStore, count: u64) -> UnauthenticatedConnections {
    let start = Instant::now();
    loop {
        let unauthenticated = store.unauthenticated().unwrap();
        if unauthenticated.refused >= count || start.elapsed() > SECONDS {
            return unauthenticated;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn connect_unauthenticated(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).unwrap()
}

#[test]
fn whoever_has_another_key_or_none_is_refused_at_once_and_counted() {
    let start = Instant::now();
    let keys = [key(), RunKey::of("the secret of another run"), RunKey::default()];
    for ours in &keys {
        let (store, mut unauthenticated) = (serve(ours), 0);
        for callers_key in &keys {
            let caller =
                KeyValueStore::connect("127.0.0.1", store.port(), "test/", callers_key, SECONDS);
            match (caller, ours == callers_key) {
                (Ok(caller), true) => {
                    caller.set("key", "value").unwrap();
                    assert_eq!(store.find("key").unwrap().as_deref(), Some("value"));
                }
                (Err(Error::Stranger { what }), false) => {
                    assert!(what.contains("it refused this rank's run key"), "{what}");
                    unauthenticated += 1;
                    let counted = refused(&store, unauthenticated);
                    assert_eq!(counted.refused, unauthenticated);
                    assert!(counted.last.contains("127.0.0.1:"), "{counted:?}");
                    assert!(counted.last.contains("proof"), "{counted:?}");
                }
                (other, _) => panic!("{other:?}"),
            }
        }
    }
    assert!(start.elapsed() < SECONDS, "nobody waits for a stranger to find its key");
}

/// A recorded proof of an admitted caller is worthless to an eavesdropper.
#[test]
fn what_was_overheard_lets_nobody_in() {
    let store = serve(&key());
    let ears = TcpListener::bind("127.0.0.1:0").unwrap();
    let (near, port) = (ears.local_addr().unwrap().port(), store.port());
    let overheard = thread::spawn(move || {
        let (mut caller, _) = ears.accept().unwrap();
        let mut store = connect_unauthenticated(port);
        let (mut greeting, mut said, mut verdict) = ([0; 64], [0; 64], [0; 33]);
        store.read_exact(&mut greeting).unwrap();
        caller.write_all(&greeting).unwrap();
        caller.read_exact(&mut said).unwrap();
        store.write_all(&said).unwrap();
        store.read_exact(&mut verdict).unwrap();
        caller.write_all(&verdict).unwrap();
        (greeting, said, verdict)
    });
    drop(KeyValueStore::connect("127.0.0.1", near, "test/", &key(), SECONDS).unwrap());
    let (greeting, said, verdict) = overheard.join().unwrap();
    assert_eq!(verdict[0], 1, "whom it was overheard from was let in");
    // Replayed to the store, as if from that caller.
    let mut again = connect_unauthenticated(port);
    let (mut other, mut answer) = ([0; 64], [0; 33]);
    again.read_exact(&mut other).unwrap();
    again.write_all(&said).unwrap();
    again.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [0; 33]);
    assert_ne!(other, greeting);
    assert_eq!(refused(&store, 1).refused, 1);
    // And replayed to a caller, as if from that store.
    let ears = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = ears.local_addr().unwrap().port();
    let pretender = thread::spawn(move || {
        let (mut caller, _) = ears.accept().unwrap();
        caller.write_all(&greeting).unwrap();
        caller.read_exact(&mut [0; 64]).unwrap();
        caller.write_all(&verdict).unwrap();
    });
    let refusal = KeyValueStore::connect("127.0.0.1", near, "test/", &key(), SECONDS).unwrap_err();
    assert!(refusal.to_string().contains("does not have this rank's run key"), "{refusal}");
    pretender.join().unwrap();
}

#[test]
fn a_port_of_another_program_is_told() {
    let ears = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = ears.local_addr().unwrap().port();
    let other = thread::spawn(move || {
        let (mut caller, _) = ears.accept().unwrap();
        caller.write_all(&[b'!'; 100]).unwrap();
        let _ = caller.read(&mut [0; 1]);
    });
    let refusal = KeyValueStore::connect("127.0.0.1", near, "test/", &key(), SECONDS).unwrap_err();
    assert!(refusal.to_string().contains("not a store of this program"), "{refusal}");
    other.join().unwrap();
}

/// Callers that send nothing, something else, too much, a part, or disconnect.
fn pester(port: u16, round: usize) -> Option<TcpStream> {
    let mut stream = connect_unauthenticated(port);
    let said = match round % 5 {
        0 => return Some(stream),
        1 => b"GET / HTTP/1.1\r\nHost: a run of somebody else, who has no key for it\r\n\r\n"
            .to_vec(),
        2 => vec![0xff; 1 << 20],
        3 => vec![0; 17],
        _ => Vec::new(),
    };
    // The store closes while it is being sent too much.
    let _ = stream.write_all(&said);
    Some(stream).filter(|_| round.is_multiple_of(2))
}

#[test]
fn strangers_disturb_neither_a_meeting_nor_a_run() {
    let store = serve(&key());
    let port = store.port();
    let mut open: Vec<_> = (0..200).filter_map(|round| pester(port, round)).collect();
    thread::scope(|scope| {
        let ranks = [0, 1, 2].map(|rank| {
            scope.spawn(move || {
                let group = Group::open(&keyed(rank, 3, port), SECONDS, &|_| ()).unwrap();
                for turn in 0..50u8 {
                    let heard = group.all_gather("a word", &[turn, rank as u8]).unwrap();
                    assert_eq!(heard, [[turn, 0], [turn, 1], [turn, 2]]);
                    thread::sleep(Duration::from_millis(4));
                }
                group.barrier("the end").unwrap();
                group.unauthenticated()
            })
        });
        open.extend((0..200).filter_map(|round| pester(port, round)));
        for rank in ranks {
            assert!(rank.join().unwrap().refused > 0);
        }
    });
    // A refused stranger receives nothing but the refusal.
    for mut stream in open {
        let mut said = Vec::new();
        match stream.set_read_timeout(Some(SECONDS)).and_then(|()| stream.read_to_end(&mut said)) {
            Ok(_) => (),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        assert!(matches!(said.len(), 0 | 64 | 97), "{}", said.len());
        assert!(said.get(64..).is_none_or(|verdict| verdict.iter().all(|byte| *byte == 0)));
    }
    // A rank that was dropped during the flood has reconnected, and may be counted, too.
    assert!(refused(&store, 400).refused >= 400);
}

#[test]
fn a_meeting_that_fails_names_the_strangers() {
    let store = serve(&key());
    let other = RunKey::of("the secret of another run");
    KeyValueStore::connect("127.0.0.1", store.port(), "test/", &other, SECONDS).unwrap_err();
    refused(&store, 1);
    let patience = Duration::from_millis(300);
    let error = Group::open(&keyed(1, 2, store.port()), patience, &|_| ()).unwrap_err().to_string();
    let wanted = "missing is rank 0; 1 connection was refused for want of this run's key, the last from 127.0.0.1:";
    assert!(error.contains(wanted), "{error}");
}

/// Like a store under a flood of strangers.
#[test]
fn a_store_kept_ready_that_lets_a_rank_go_is_asked_again() {
    let ears = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = ears.local_addr().unwrap().port();
    let busy = thread::spawn(move || {
        drop(ears.accept().unwrap());
        let mut caller = wire::Connection::new(ears.accept().unwrap().0).unwrap();
        caller.admit(&key(), wire::Deadline::after(SECONDS), || Ok(())).unwrap();
    });
    assert!(KeyValueStore::ready("127.0.0.1", near, "test/", &key(), SECONDS).is_some());
    busy.join().unwrap();
    // No process listens there any more: the next one is asked.
    assert!(KeyValueStore::ready("127.0.0.1", near, "test/", &key(), SECONDS).is_none());
}

/// One that speaks with the store but has another key for the transfers, as if it had taken a rank's connection over.
#[test]
fn a_transfer_that_does_not_prove_the_key_ends_the_meeting() {
    let store = serve(&key());
    let port = store.port();
    let start = Instant::now();
    let errors = thread::scope(|scope| {
        let ranks = [0, 1, 2].map(|rank| {
            scope.spawn(move || {
                let mut place = keyed(rank, 3, port);
                let store = KeyValueStore::connect("127.0.0.1", port, &place.name, &key(), SECONDS)
                    .unwrap();
                if rank == 2 {
                    place.key = RunKey::of("the secret of another run");
                }
                Peers::at(store, &place, SECONDS, &|_| ()).map(|_| ()).unwrap_err().to_string()
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    assert!(start.elapsed() < SECONDS);
    // The first rank to find it out leaves, and the others get its report.
    for error in &errors {
        assert!(error.contains("did not prove the run's key"), "{error}");
    }
    let word = store.find(store::FAULT).unwrap().unwrap();
    assert!(word.contains("did not prove the run's key"), "{word}");
}

/// Rank 0 holds the store, rank 1 keeps one ready: strangers of both are counted in the first.
#[test]
fn strangers_at_a_store_that_is_kept_ready_are_counted_too() {
    let port = free_port();
    thread::scope(|scope| {
        for rank in [0, 1] {
            scope.spawn(move || {
                let place = RankAddress { rank_0_serves: true, ..keyed(rank, 2, port) };
                let group = Group::open(&place, SECONDS, &|_| ()).unwrap();
                let rendezvous = Rendezvous::open(&place, &group, SECONDS).unwrap();
                let ready = group.store().unwrap();
                let meeting =
                    KeyValueStore::connect("127.0.0.1", port, "test/meeting/", &key(), SECONDS);
                let said = meeting.unwrap().find("ready/1").unwrap().unwrap();
                let standby = said.split(' ').next().unwrap().parse().unwrap();
                if rank == 1 {
                    (0..3).for_each(|_| drop(connect_unauthenticated(standby)));
                    while ready.unauthenticated().unwrap().refused < 3 {
                        rendezvous.report_unauthenticated();
                        thread::sleep(Duration::from_millis(5));
                    }
                    rendezvous.report_unauthenticated();
                }
                group.barrier("the end").unwrap();
                assert_eq!(group.unauthenticated().refused, 3);
                group.barrier("the very end").unwrap();
            });
        }
    });
}

#[test]
fn a_store_that_is_dropped_is_gone() {
    let store = serve(&key());
    let port = store.port();
    let caller = KeyValueStore::connect("127.0.0.1", port, "test/", &key(), SECONDS).unwrap();
    caller.set("key", "value").unwrap();
    let start = Instant::now();
    drop(store);
    let error = caller.find("key").unwrap_err().to_string();
    assert!(error.contains("the store does not answer"), "{error}");
    assert!(start.elapsed() < SECONDS, "its end is noticed without waiting");
    TcpListener::bind(("127.0.0.1", port)).unwrap();
}
