//! Ranks as threads, over the loopback.

use super::store::FAULT;
use super::unauthenticated_tests::free_port;
use super::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use tch::Kind;

pub(super) fn place(rank: u32, world: u32, port: u16) -> RankAddress {
    let (host, name, interface) = ("127.0.0.1".to_owned(), "test/".to_owned(), String::new());
    // Two ranks to a machine.
    let node = (rank / 2).to_string();
    let key = RunKey::default();
    RankAddress { rank, world, host, port, rank_0_serves: false, key, name, interface, node }
}

pub(super) const SECONDS: Duration = Duration::from_secs(20);

/// Runs `work` as every rank but those in `absent`, each on a thread.
pub(super) fn ranks<T: Send>(
    world: u32,
    timeout: Duration,
    work: impl Fn(Group) -> T + Sync,
) -> Vec<T> {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let (port, work) = (store.port(), &work);
    thread::scope(|scope| {
        let run = |rank| {
            scope.spawn(move || {
                work(Group::open(&place(rank, world, port), timeout, &|_| ()).unwrap())
            })
        };
        let handles: Vec<_> = (0..world).map(run).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

#[test]
fn everybody_hears_everybody() {
    for world in [1, 2, 3, 5] {
        let gathered = ranks(world, SECONDS, |group| {
            let message = vec![group.rank() as u8; group.rank() as usize * 508];
            let gathered = group.all_gather("a test", &message).unwrap();
            group.barrier("the end").unwrap();
            gathered
        });
        let wanted: Vec<_> = (0..world).map(|rank| vec![rank as u8; rank as usize * 508]).collect();
        assert!(gathered.iter().all(|gathered| *gathered == wanted), "{world} ranks");
    }
}

/// Two ranks to a machine: to its leader, between leaders, and back; within a single machine directly.
#[test]
fn words_of_all_go_by_node() {
    for (world, messages, between) in [(2, 2, 0), (3, 4, 2), (4, 6, 2), (5, 10, 6), (8, 20, 12)] {
        let sent = ranks(world, SECONDS, |group| {
            group.barrier("the start").unwrap();
            let before = group.sent();
            group.all_gather("a test", b"a word").unwrap();
            let after = group.sent();
            group.barrier("the end").unwrap();
            (after.all - before.all, after.between_nodes - before.between_nodes)
        });
        let (all, crossed): (Vec<u64>, Vec<u64>) = sent.into_iter().unzip();
        let sums = [all, crossed].map(|bytes| bytes.iter().sum::<u64>());
        assert_eq!(sums, [messages, between].map(|count| count * 1024), "{world} ranks");
    }
}

#[test]
fn transfers_keep_their_order_and_their_bits() {
    let found = ranks(3, SECONDS, |group| {
        let mut exchange = group.begin("a test").unwrap();
        for to in group.others() {
            for part in 0..4 {
                let value = f32::from_bits(0x7f80_0001 + group.rank() * 100 + to * 10 + part);
                exchange.send(0, to, &Tensor::from_slice(&[value, -0.0])).unwrap();
            }
        }
        let parts = |from| {
            let parts: Vec<_> =
                (0..4).map(|_| exchange.receive(0, from, Kind::Float, 2).unwrap()).collect();
            // The order of waits must not depend on the order of arrivals.
            let mut bits: Vec<_> = parts
                .into_iter()
                .rev()
                .map(|part| Vec::<f32>::try_from(part.wait().unwrap()).unwrap())
                .map(|values| (values[0].to_bits(), values[1].to_bits()))
                .collect();
            bits.reverse();
            (from, bits)
        };
        let found: Vec<_> = group.others().map(parts).collect();
        exchange.finish().unwrap();
        (group.rank(), found)
    });
    for (rank, heard) in found {
        for (from, bits) in heard {
            let wanted = (0..4)
                .map(|part| (0x7f80_0001 + from * 100 + rank * 10 + part, (-0.0f32).to_bits()));
            assert_eq!(bits, wanted.collect::<Vec<_>>(), "from {from} to {rank}");
        }
    }
}

#[test]
fn what_left_is_let_go_and_what_crosses_machines_is_counted() {
    let sent = ranks(3, SECONDS, |group| {
        let before = group.sent();
        let mut exchange = group.begin("a test").unwrap();
        let arrivals: Vec<_> = group
            .others()
            .flat_map(|from| [1i64, 2, 3].map(|size| (from, size)))
            .map(|(from, size)| exchange.receive(0, from, Kind::Float, size * 1000).unwrap())
            .collect();
        for size in [1i64, 2, 3] {
            for to in group.others() {
                exchange.send(0, to, &Tensor::ones([size * 1000], tch::kind::FLOAT_CPU)).unwrap();
            }
            exchange.left(exchange.begun() - 2).unwrap();
            assert!(exchange.sends.len() <= 2 && exchange.begun() == 2 * size as usize);
        }
        arrivals.into_iter().for_each(|arrival| drop(arrival.wait().unwrap()));
        exchange.finish().unwrap();
        let after = group.sent();
        group.barrier("the end").unwrap();
        assert_eq!(group.nodes(), ["0", "0", "1"]);
        (after.all - before.all, after.between_nodes - before.between_nodes)
    });
    // 6,000 elements to each of two others; ranks 0 and 1 share a machine.
    assert_eq!(sent, [(48_000, 24_000), (48_000, 24_000), (48_000, 48_000)]);
}

/// Waits until so many have given up.
fn until(given_up: &AtomicU32, count: u32) {
    while given_up.load(Ordering::Relaxed) < count {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_by_all() {
    let (timeout, given_up) = (Duration::from_millis(1500), AtomicU32::new(0));
    let errors = ranks(4, timeout, |group| {
        group.barrier("the start").unwrap();
        group.reached(&format!("step 7, micro-batch {}", group.rank()));
        if group.rank() == 2 {
            until(&given_up, 3);
            return None;
        }
        let error = group.barrier("the gathering of losses").unwrap_err().to_string();
        given_up.fetch_add(1, Ordering::Relaxed);
        Some(error)
    });
    for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != 2) {
        let error = error.as_ref().unwrap();
        assert!(error.contains("rank 2, last seen at step 7, micro-batch 2"), "{rank}: {error}");
        assert!(error.contains("the gathering of losses"), "{rank}: {error}");
        assert!(!error.contains("micro-batch 0;") && !error.contains("rank 3, last"), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_is_missed_at_once() {
    let start = Instant::now();
    let errors = ranks(3, SECONDS, |group| {
        group.barrier("the start").unwrap();
        if group.rank() == 1 {
            return None;
        }
        Some(group.barrier("the gathering of losses").unwrap_err().to_string())
    });
    assert!(start.elapsed() < SECONDS, "a lost connection is noticed without waiting");
    for error in [&errors[0], &errors[2]] {
        assert!(error.as_ref().unwrap().contains("rank 1, last seen at"), "{error:?}");
    }
}

#[test]
fn a_rank_that_never_starts_is_named() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let timeout = Duration::from_secs(2);
    let error = Group::open(&place(1, 3, store.port()), timeout, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("within 2 s: here is rank 1; missing are ranks 0, 2"), "{error}");
    assert!(error.contains("MASTER_ADDR"), "{error}");
    let nobody = KeyValueStore::connect("127.0.0.1", 1, "test/", &RunKey::default(), timeout)
        .unwrap_err()
        .to_string();
    assert!(nobody.contains("store"), "{nobody}");
}

/// Of very many ranks a few are named, and neither querying nor naming them takes longer than the deadline.
#[test]
fn many_ranks_that_never_start_are_counted() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let (timeout, start) = (Duration::from_secs(2), Instant::now());
    let many = place(1, 1 << 20, store.port());
    let error = Group::open(&many, timeout, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("missing are ranks 0, 2, 3, 4,"), "{error}");
    assert!(error.contains(" 16 and 1048559 more"), "{error}");
    assert!(error.len() < 500 && start.elapsed() < SECONDS, "{error}");
}

#[test]
fn two_processes_of_one_rank_are_told_so_and_nobody_waits_for_the_rest() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let (start, port) = (Instant::now(), store.port());
    let open = move |rank| {
        thread::spawn(move || {
            Group::open(&place(rank, 3, port), SECONDS, &|_| ()).unwrap_err().to_string()
        })
    };
    let errors = [open(0), open(1), open(1)].map(|rank| rank.join().unwrap());
    assert!(errors.iter().all(|error| error.contains("two processes are rank 1")), "{errors:?}");
    assert!(start.elapsed() < SECONDS);
}

/// A process that comes when all have met, as from a second launch, fails alone: the others continue.
#[test]
fn a_process_too_many_ends_alone_once_all_have_met() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let port = store.port();
    let open =
        move |rank| thread::spawn(move || Group::open(&place(rank, 2, port), SECONDS, &|_| ()));
    let groups = [open(0), open(1)].map(|rank| rank.join().unwrap().unwrap());
    let of_others = place(2, 3, port);
    let alone = Group::open(&of_others, SECONDS, &|_| ()).map(drop);
    for error in [open(1).join().unwrap().map(drop), alone].map(Result::unwrap_err) {
        assert!(matches!(error, Error::Mistaken { .. }), "{error}");
    }
    groups.iter().for_each(|group| group.check().unwrap());
}

/// The first process holds the store; the second cannot open its own.
#[test]
fn two_processes_of_rank_0_are_both_told_so_at_once() {
    let free = free_port();
    let start = Instant::now();
    let open = || {
        thread::spawn(move || {
            let place = RankAddress { rank_0_serves: true, ..place(0, 2, free) };
            Group::open(&place, SECONDS, &|_| ()).unwrap_err()
        })
    };
    for error in [open(), open()].map(|rank| rank.join().unwrap()) {
        assert!(matches!(error, Error::Mistaken { .. }), "{error}");
        assert!(error.to_string().contains("two processes are rank 0"), "{error}");
    }
    assert!(start.elapsed() < SECONDS);
}

/// Another program has the port.
#[test]
fn a_port_that_is_taken_is_told_as_that() {
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let place = RankAddress { rank_0_serves: true, ..place(0, 2, port) };
    let error = Group::open(&place, SECONDS, &|_| ()).unwrap_err();
    assert!(
        matches!(error, Error::Mistaken { .. }),
        "the same command would end so again: {error}"
    );
    let error = error.to_string();
    for word in ["the port is taken", "another rank 0", "MASTER_PORT"] {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
}

#[test]
fn ranks_of_different_numbers_are_told_both_of_them_at_once() {
    for ranks in [[(0, 2), (1, 3)], [(0, 2), (2, 3)]] {
        let store =
            KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
        let (start, port) = (Instant::now(), store.port());
        let open = |(rank, world)| {
            thread::spawn(move || {
                Group::open(&place(rank, world, port), SECONDS, &|_| ()).unwrap_err()
            })
        };
        for error in ranks.map(open).map(|rank| rank.join().unwrap()) {
            assert!(matches!(error, Error::Mistaken { .. }), "{error}");
            for word in ["one of 2", "one of 3", "WORLD_SIZE"] {
                assert!(error.to_string().contains(word), "no {word:?} in: {error}");
            }
        }
        assert!(start.elapsed() < SECONDS);
    }
}

#[test]
fn the_first_word_stands() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "a/", &RunKey::default(), SECONDS).unwrap();
    let other =
        KeyValueStore::connect("127.0.0.1", store.port(), "a/", &RunKey::default(), SECONDS)
            .unwrap();
    assert_eq!(store.find("key").unwrap(), None);
    assert_eq!(other.first("key", "mine").unwrap(), "mine");
    assert_eq!(store.first("key", "yours").unwrap(), "mine");
    assert_eq!(store.find("key").unwrap().as_deref(), Some("mine"));
    let soon = Duration::from_millis(20);
    assert_eq!(store.wait("key", soon).unwrap().as_deref(), Some("mine"));
    assert_eq!(store.wait("never", soon).unwrap(), None);
    store.set(FAULT, "rank 3: the disk is full").unwrap();
    let start = Instant::now();
    let error = store.wait("never", SECONDS).unwrap_err().to_string();
    assert!(error.contains("rank 3: the disk is full") && start.elapsed() < SECONDS);
    let apart =
        KeyValueStore::connect("127.0.0.1", store.port(), "b/", &RunKey::default(), SECONDS)
            .unwrap();
    assert_eq!(apart.find("key").unwrap(), None, "names keep launches apart");
}

#[test]
fn where_a_library_does_not_serve_every_rank_is_told() {
    let said = ranks(2, SECONDS, |mut group| {
        let refused = group.choose_transport(Device::Cpu, Transport::Rccl).unwrap_err().to_string();
        // Plain memory with `Auto` chooses Gloo without a reason.
        let chosen = group.choose_transport(Device::Cpu, Transport::Auto).unwrap();
        assert_eq!(chosen, TransportChoice::default());
        assert!(!group.by_rccl());
        // A choice may be made anew.
        assert_eq!(
            group.choose_transport(Device::Cpu, Transport::Gloo).unwrap(),
            TransportChoice::default()
        );
        refused
    });
    // No real library moves plain memory, and most machines have none.
    for said in said {
        let why = ["none of librccl.so.1", "it moves the memory of GPUs only"];
        assert!(why.iter().any(|why| said.contains(&format!("rank 0: {why}"))), "{said}");
    }
}

#[test]
fn a_rank_that_is_alone_hears_itself_and_waits_for_nobody() {
    let mut group = Group::alone();
    assert_eq!((group.rank(), group.world(), group.nodes().len()), (0, 1, 1));
    assert_eq!(
        group.choose_transport(Device::Cpu, Transport::Rccl).unwrap(),
        TransportChoice::default()
    );
    assert_eq!(group.all_gather("a word", b"mine").unwrap(), [b"mine"]);
    group.barrier("the end").unwrap();
    group.report("a fault");
    assert!(group.spoke_first() && group.others().next().is_none() && group.store().is_none());
    assert_eq!(group.sent(), SentBytes::default());
    assert!(group.begin("an exchange").is_err(), "there is nobody to exchange with");
}

#[test]
fn libtorch_s_collectives_answer() {
    let sums = ranks(2, SECONDS, |group| {
        let rank = f64::from(group.rank());
        let ones = |count: i64| Tensor::ones([count], tch::kind::FLOAT_CPU) * (rank + 1.0);
        let sum = |tensor: &Tensor| tensor.sum(Kind::Double).double_value(&[]);
        let mut found = Vec::new();
        for (which, input, output) in [
            (Collective::AllReduce, 8, 0),
            (Collective::ReduceScatter, 8, 4),
            (Collective::AllGather, 4, 8),
            (Collective::Broadcast, 8, 0),
            (Collective::AllToAll, 8, 8),
        ] {
            let (input, output) = (ones(input), ones(output));
            group.collective(which, &input, &output).unwrap();
            found.push(sum(if output.numel() == 0 { &input } else { &output }));
        }
        found
    });
    assert_eq!(sums, vec![vec![24.0, 12.0, 12.0, 8.0, 12.0]; 2]);
}

/// A pause of up to 2 ms that differs between ranks without a pattern.
fn nap(rank: u32, at: u64) {
    let mixed =
        (u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at.wrapping_mul(0xbf58_476d);
    thread::sleep(Duration::from_micros((mixed >> 7) % 2000));
}

/// Sends `number` to all of `others` and checks that each sends what `number_of` says.
fn trade(mut exchange: Exchange<'_>, others: &[u32], number: i64, number_of: impl Fn(u32) -> i64) {
    let mut arrivals = Vec::new();
    for from in others {
        arrivals.push((*from, exchange.receive(0, *from, Kind::Int64, 3).unwrap()));
    }
    for to in others {
        exchange.send(0, *to, &Tensor::from_slice(&[number; 3])).unwrap();
    }
    exchange.close(0).unwrap();
    for (from, arrival) in arrivals {
        assert_eq!(Vec::<i64>::try_from(arrival.wait().unwrap()).unwrap(), [number_of(from); 3]);
    }
    exchange.finish().unwrap();
}

/// While gradients are under way, every rank runs layers that exchange along two other axes, at its own pace.
#[test]
fn a_layer_exchanges_while_gradients_are_under_way() {
    for (world, size) in [(2, 2), (3, 3), (4, 2), (5, 1), (8, 4), (8, 8)] {
        ranks(world, SECONDS, |group| {
            let me = group.rank();
            let line: Vec<u32> = (me / size * size..me / size * size + size).collect();
            let axes = [group.axis(1, &line).unwrap(), group.axis(2, &line).unwrap()];
            for step in 0..4 {
                let mut gradients = group.begin("gradients").unwrap();
                let receive = |from| (from, gradients.receive(0, from, Kind::Int64, 2).unwrap());
                let arrivals: Vec<_> = group.others().map(receive).collect();
                for layer in 0..6 {
                    nap(me, step * 100 + layer);
                    if layer == (step + u64::from(me)) % 6 {
                        let tensor = Tensor::from_slice(&[step as i64, i64::from(me)]);
                        group.others().for_each(|to| gradients.send(0, to, &tensor).unwrap());
                    }
                    for (index, axis) in axes.iter().enumerate() {
                        let value = |rank: u32| {
                            step as i64 * 10_000
                                + layer as i64 * 100
                                + index as i64 * 10
                                + i64::from(rank)
                        };
                        let others: Vec<u32> = axis.others().collect();
                        trade(axis.begin("a layer").unwrap(), &others, value(me), value);
                    }
                }
                gradients.close(0).unwrap();
                for (from, arrival) in arrivals {
                    let found = Vec::<i64>::try_from(arrival.wait().unwrap()).unwrap();
                    assert_eq!(found, [step as i64, i64::from(from)]);
                }
                gradients.finish().unwrap();
            }
            group.barrier("the end").unwrap();
        });
    }
}

/// Each axis on its own thread: their order differs between ranks.
#[test]
fn axes_have_no_order_among_each_other() {
    for world in [2, 3, 8] {
        ranks(world, SECONDS, |group| {
            let (me, all) = (group.rank(), (0..world).collect::<Vec<_>>());
            let axes = [1, 2, 3].map(|axis| group.axis(axis, &all).unwrap());
            thread::scope(|scope| {
                for (index, axis) in axes.iter().enumerate() {
                    scope.spawn(move || {
                        for turn in 0..12 {
                            nap(me, index as u64 * 1000 + turn);
                            let value = |rank: u32| {
                                index as i64 * 10_000 + turn as i64 * 100 + i64::from(rank)
                            };
                            let others: Vec<u32> = axis.others().collect();
                            trade(axis.begin("a layer").unwrap(), &others, value(me), value);
                        }
                    });
                }
                for turn in 0..12u8 {
                    nap(me, 9000 + u64::from(turn));
                    let heard = group.all_gather("a word", &[turn, me as u8]).unwrap();
                    let wanted: Vec<_> = all.iter().map(|rank| vec![turn, *rank as u8]).collect();
                    assert_eq!(heard, wanted);
                }
            });
            group.barrier("the end").unwrap();
        });
    }
}

#[test]
fn a_rank_that_does_not_come_to_its_line_is_missed_there() {
    let given_up = AtomicU32::new(0);
    let found = ranks(3, Duration::from_secs(2), |group| {
        let axis = group.axis(1, &[0, 1]);
        if group.rank() == 2 {
            assert!(axis.is_err(), "it is no rank of that line");
        }
        if group.rank() > 0 {
            until(&given_up, 1);
            return String::new();
        }
        let axis = axis.unwrap();
        let mut exchange = axis.begin("a layer").unwrap();
        let arrival = exchange.receive(0, 1, Kind::Float, 4).unwrap();
        let error = arrival.wait().unwrap_err().to_string();
        given_up.fetch_add(1, Ordering::Relaxed);
        error
    });
    assert!(found[0].contains("rank 1") && found[0].contains("a layer"), "{}", found[0]);
    assert!(!found[0].contains("rank 2"), "{}", found[0]);
}

/// A rank of five that loses others one after the other; the remaining ones meet again each time.
fn outlive(rank: u32, port: u16, rank_0_serves: bool, leavers: &[u32]) {
    let place = RankAddress { rank_0_serves, ..place(rank, 5, port) };
    let mut group = Group::open(&place, SECONDS, &|_| ()).unwrap();
    let mut rendezvous = Rendezvous::open(&place, &group, SECONDS).unwrap();
    for (gone, leaver) in leavers.iter().enumerate() {
        if rank == *leaver {
            return;
        }
        group.barrier("a loss").unwrap_err();
        let mut blamed = group.lost().unwrap();
        // Its connections close: the others notice the loss.
        drop(std::mem::replace(&mut group, Group::alone()));
        group = loop {
            rendezvous.agree(&blamed, 1, SECONDS).unwrap();
            // The store may be lost after only some ranks have read the member list.
            match rendezvous.group(SECONDS, &|_| ()) {
                Ok(group) => break group,
                Err(_) => blamed.clear(),
            }
        };
        let left: Vec<u32> = (0..5).filter(|one| !leavers[..=gone].contains(one)).collect();
        assert!(rendezvous.generation() > gone as u64);
        assert_eq!(rendezvous.members(), left);
        let gathered = group.all_gather("who is here", &[rank as u8]).unwrap();
        let gathered: Vec<u32> = gathered.iter().map(|bytes| u32::from(bytes[0])).collect();
        assert_eq!(gathered, left, "numbered anew, in the same order");
    }
}

#[test]
fn those_who_are_left_meet_again_until_one_is_alone() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let port = store.port();
    thread::scope(|scope| {
        for rank in 0..5 {
            scope.spawn(move || outlive(rank, port, false, &[1, 0, 4, 3]));
        }
    });
}

#[test]
fn so_do_they_where_the_store_is_lost_with_the_rank_that_held_it() {
    let port = free_port();
    thread::scope(|scope| {
        for rank in 0..5 {
            scope.spawn(move || outlive(rank, port, true, &[0, 3, 1, 2]));
        }
    });
}

#[test]
fn nobody_goes_on_with_too_few_nor_waits_for_whom_the_others_left() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let mut agent = Agent::new(&store, "test/", 3);
    let meets = |rank: u32| {
        let place = place(rank, 3, store.port());
        let group = Group::alone();
        Rendezvous::open(&place, &group, SECONDS).unwrap()
    };
    let [mut first, mut second, mut third] = [0, 1, 2].map(meets);
    agent.ended(2, false, "killed").unwrap();
    // The second one was blamed, and has not come so far.
    let refused = first.agree(&[1], 3, SECONDS);
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("too few ranks are left to go on: 1 of 3 (ranks 0), wanted 3")
    );
    second.agree(&[0], 1, SECONDS).unwrap();
    assert_eq!((agent.members().unwrap(), second.members()), (&[0, 1][..], &[0, 1][..]));
    let late = third.agree(&[], 1, SECONDS).unwrap_err().to_string();
    assert!(late.contains("the other ranks went on without rank 2"), "{late}");
}

#[test]
fn a_launcher_asks_its_own_store_without_a_connection() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let mut agent = Agent::new(&store, "test/", 2);
    thread::scope(|scope| {
        for rank in 0..2 {
            let place = place(rank, 2, store.port());
            scope.spawn(move || Group::open(&place, SECONDS, &|_| ()).unwrap().reached("step 1"));
        }
    });
    let ranks = store.connections();
    assert_eq!(ranks, Some(2));
    for _ in 0..20 {
        assert_eq!(agent.members().unwrap(), [0, 1]);
        let places = agent.whereabouts().unwrap().into_iter();
        let places: Vec<_> = places.map(|(rank, at)| (rank, at.unwrap().place)).collect();
        assert_eq!(places, [0, 1].map(|rank| (rank, "step 1".to_owned())));
    }
    agent.ended(1, false, "killed").unwrap();
    assert!(store.find("fault").unwrap().unwrap().contains("rank 1: killed"));
    assert_eq!(store.connections(), ranks);
}
