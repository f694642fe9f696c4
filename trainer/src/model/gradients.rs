//! Gradients on their way out: made for each chunk of a micro-batch, added over chunks, handed on.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::{Fault, Result};
use kernels::addend::Addend;
use kernels::ops::{Gradient, Present, Table};
use kernels::tree::{self, Node, Nodes, Pair, Sum, blocks};
use tch::{Device, Kind, Tensor};

use super::line::Dealt;
use super::param::ParamId;
use crate::refusal::refused;

/// Where gradients go, each the moment it exists.
pub trait Sink {
    /// Takes the gradient of the loss over the label count with respect to parameter `id`, of its shape, as a layer made it.
    ///
    /// Each parameter has exactly one in a micro-batch; in which order they come is not promised.
    fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()>;

    /// Takes what the chunks here add to it where other places of a line have the others: their blocks in the tree, in its
    /// order. All places hand over the same parameters in the same order.
    fn part(&mut self, id: ParamId, _: Term, _: Vec<ChunkSum>) -> Result<()> {
        Err(Fault::bug(format!("nobody adds up the parts of parameter {}", id.index())))
    }
}

/// All gradients of a micro-batch, for who wants them together.
#[derive(Debug, Default)]
pub struct Collected(Vec<Option<Tensor>>);

impl Collected {
    /// The gradients in canonical order.
    pub(crate) fn into_vec(self) -> Result<Vec<Tensor>> {
        let missing = || Fault::bug("a parameter has no gradient");
        self.0.into_iter().map(|gradient| gradient.ok_or_else(missing)).collect()
    }
}

impl Sink for Collected {
    fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()> {
        if self.0.len() <= id.index() {
            self.0.resize_with(id.index() + 1, || None);
        }
        match self.0[id.index()].replace(gradient.wide().map_err(refused)?) {
            None => Ok(()),
            Some(_) => Err(Fault::bug(format!("parameter {} has two gradients", id.index()))),
        }
    }
}

/// Elements of the largest gradient on a device whose sum over chunks waits for its layer's end, to be made together with others:
/// a larger one is worth a launch of its own, and should not be kept.
const SMALL: usize = 1 << 20;

/// Gradients of the chunks that are here: each parameter's sum goes to the sink when its last chunk has come.
pub(super) struct Gradients<'a> {
    sink: &'a mut dyn Sink,
    dealt: Dealt,
    /// The chunks here, in the order of the sequence.
    own: Vec<u64>,
    waiting: BTreeMap<Key, Waiting>,
    /// First terms that wait for second ones, where all chunks are here.
    first: BTreeMap<usize, Tensor>,
    /// What is still to be finished.
    begun: Vec<Begun>,
}

/// What a chunk adds to the gradient of a parameter, before it is finished.
struct Begun {
    id: ParamId,
    term: Term,
    chunk: u64,
    gradient: Gradient,
    /// Of a stack of experts, which had tokens: that decides the sum over chunks.
    used: Option<Present>,
}

/// The same, as a chunk sees them.
pub(super) struct ChunkGradients<'a, 'b> {
    all: &'a mut Gradients<'b>,
    chunk: u64,
}

/// Which of the sums over chunks that make up a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Term {
    /// There is no other.
    Only,
    /// The second one is added to it.
    First,
    /// Comes when the first one has come.
    Second,
}

/// A gradient, or one of the sums that make it up.
type Key = (ParamId, Term);

/// A sum over the chunks here.
struct Waiting {
    nodes: Nodes<ChunkSum>,
    missing: u64,
}

/// What a chunk, or some that stand together in the tree, add to the gradient of a parameter.
#[derive(Debug)]
pub struct ChunkSum {
    /// The numbers, f32: of the parameter's shape, or some of them in one row.
    pub(crate) gradient: Tensor,
    /// Of a stack of experts, which of them had tokens.
    pub(crate) experts: Option<Used>,
}

/// Which experts had tokens, and where their numbers stand.
#[derive(Debug)]
pub(crate) struct Used {
    /// Them.
    pub(crate) present: Present,
    /// Of each run of numbers of one expert: which one, where it begins, how many they are.
    spans: Vec<(usize, i64, i64)>,
}

impl<'a> Gradients<'a> {
    /// To `sink`, of the chunks that `dealt` says are here.
    pub(super) fn new(sink: &'a mut dyn Sink, dealt: Dealt) -> Self {
        let (waiting, first) = (BTreeMap::new(), BTreeMap::new());
        let (own, begun) = (dealt.own(), Vec::new());
        Gradients { sink, dealt, own, waiting, first, begun }
    }

    /// Where the `at`-th chunk here hands its gradients.
    pub(super) fn of(&mut self, at: usize) -> ChunkGradients<'_, 'a> {
        let chunk = self.own[at];
        ChunkGradients { all: self, chunk }
    }

    /// Finishes what was begun, all at once, and hands it on: a layer does so at its end.
    pub(super) fn settle(&mut self, ops: Table) -> Result<()> {
        let begun = std::mem::take(&mut self.begun).into_iter();
        let (places, gradients): (Vec<_>, Vec<_>) =
            begun.map(|one| ((one.id, one.term, one.chunk, one.used), one.gradient)).unzip();
        let finished = ops.finish(gradients).map_err(refused)?;
        let mut parts = Vec::new();
        for ((id, term, chunk, used), gradient) in places.into_iter().zip(finished) {
            match self.dealt.chunks {
                1 => self.whole(id, gradient)?,
                _ => parts.push(((id, term), chunk, ChunkSum::of(gradient, used)?)),
            }
        }
        self.together(parts)
    }

    /// Takes what chunks add to many gradients: those that meet in the tree are added by one launch.
    fn together(&mut self, parts: Vec<(Key, u64, ChunkSum)>) -> Result<()> {
        let (mut complete, mut nodes) = (Vec::new(), Vec::new());
        for (key, chunk, value) in parts {
            nodes.push((key, Node { level: 0, first: self.dealt.leaf(chunk), value }));
            let sum = self.waiting(key);
            sum.missing -= 1;
            if sum.missing == 0 {
                complete.push(key);
            }
        }
        while !nodes.is_empty() {
            let mut pairs = Vec::new();
            for (key, node) in nodes {
                pairs.extend(self.waiting(key).nodes.meet(node).map(|pair| (key, pair)));
            }
            nodes = added(pairs)?;
        }
        complete.into_iter().try_for_each(|key| self.complete(key))
    }

    /// The sum over the chunks here of a gradient.
    fn waiting(&mut self, key: Key) -> &mut Waiting {
        let leaves = self.dealt.leaves(self.dealt.place);
        let missing = leaves.end - leaves.start;
        let begin = || Waiting { nodes: Nodes::new(&[leaves]), missing };
        self.waiting.entry(key).or_insert_with(begin)
    }

    /// Hands on a gradient that is a sum over chunks already.
    pub(super) fn whole(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        self.sink.gradient(id, gradient.into())
    }

    /// At once, as it is, where there is no sum over chunks. For a sum in f32: at once in main memory, on a device together with
    /// others when their layer ends, but for large ones that are f32 already.
    fn take(&mut self, begun: Begun) -> Result<()> {
        let Begun { id, term, chunk, gradient, used } = begun;
        let gradient = match gradient {
            Gradient::Made(made) if self.at_once(&made) => {
                let made = made.f_to_kind(Kind::Float).map_err(refused)?;
                return self.finished(id, term, chunk, made, used);
            }
            gradient if self.dealt.chunks == 1 => match Addend::try_from(gradient) {
                Ok(gradient) => return self.sink.gradient(id, gradient),
                Err(gradient) => gradient,
            },
            gradient => gradient,
        };
        self.begun.push(Begun { id, term, chunk, gradient, used });
        Ok(())
    }

    fn at_once(&self, made: &Tensor) -> bool {
        let large = made.kind() == Kind::Float && made.numel() > SMALL;
        self.dealt.chunks > 1 && (made.device() == Device::Cpu || large)
    }

    fn finished(
        &mut self,
        id: ParamId,
        term: Term,
        chunk: u64,
        gradient: Tensor,
        used: Option<Present>,
    ) -> Result<()> {
        let dealt = self.dealt;
        if let Some(Present::There(_)) = used {
            let value = ChunkSum::of(gradient, used)?;
            return self.together(vec![((id, term), chunk, value)]);
        }
        let sum = self.waiting((id, term));
        let value = ChunkSum::of(gradient, used)?;
        sum.nodes.push(dealt.leaf(chunk), value).map_err(refused)?;
        sum.missing -= 1;
        if sum.missing > 0 { Ok(()) } else { self.complete((id, term)) }
    }

    /// All chunks here have come.
    fn complete(&mut self, (id, term): Key) -> Result<()> {
        let mut sum = self.waiting.remove(&(id, term)).ok_or_else(missing_chunk)?.nodes;
        if self.dealt.degree > 1 {
            let leaves = self.dealt.leaves(self.dealt.place);
            let blocks = blocks(leaves.start, leaves.end).into_iter();
            let blocks = blocks.map(|(_, first)| sum.take(first).ok_or_else(missing_chunk));
            return self.sink.part(id, term, blocks.collect::<Result<_>>()?);
        }
        let gradient = sum.finish().map_err(refused)?.ok_or_else(missing_chunk)?.gradient;
        match term {
            Term::Only => self.whole(id, gradient),
            Term::First => {
                self.first.insert(id.index(), gradient);
                Ok(())
            }
            Term::Second => {
                let first = self.first.remove(&id.index()).ok_or_else(missing_chunk)?;
                self.whole(id, first.sum(gradient).map_err(refused)?)
            }
        }
    }
}

/// The sums of pairs, each with the bits of [`Sum`], by a launch or two for all of them.
fn added(pairs: Vec<(Key, Pair<ChunkSum>)>) -> Result<Vec<(Key, Node<ChunkSum>)>> {
    let (mut meeting, mut nodes) = (Meeting::default(), Vec::with_capacity(pairs.len()));
    for (key, Pair { level, first, mut left, right }) in pairs {
        left.takes(&right, &mut meeting).map_err(refused)?;
        nodes.push((key, Node { level, first, value: left }));
    }
    meeting.make().map_err(refused)?;
    Ok(nodes)
}

fn missing_chunk() -> Fault {
    Fault::bug("a chunk of a sum is missing")
}

impl ChunkGradients<'_, '_> {
    /// Of a stack of experts: `used` says which had tokens. The others have no part in the sum over chunks.
    pub(super) fn experts(&mut self, id: ParamId, gradient: Gradient, used: Present) -> Result<()> {
        let (term, chunk, used) = (Term::Only, self.chunk, Some(used));
        self.all.take(Begun { id, term, chunk, gradient, used })
    }

    /// One of several sums over chunks that make up a gradient.
    pub(super) fn term(&mut self, id: ParamId, term: Term, gradient: Gradient) -> Result<()> {
        let chunk = self.chunk;
        self.all.take(Begun { id, term, chunk, gradient, used: None })
    }
}

/// Hands on a gradient.
pub(super) fn emit(
    sink: &mut ChunkGradients<'_, '_>,
    id: ParamId,
    gradient: impl Into<Gradient>,
) -> Result<()> {
    sink.term(id, Term::Only, gradient.into())
}

impl ChunkSum {
    /// Of one chunk; of a stack of experts, `used` says which had tokens.
    fn of(gradient: Tensor, used: Option<Present>) -> Result<ChunkSum> {
        let Some(used) = used else { return Ok(ChunkSum { gradient, experts: None }) };
        Ok(ChunkSum::experts(gradient.f_contiguous().map_err(refused)?, used))
    }

    /// Puts into `meeting` to which of its numbers others of `right` are to be added, and to which copied, as if that was done:
    /// an expert that had tokens in one of both is copied, never added to zero.
    fn takes(&mut self, right: &ChunkSum, meeting: &mut Meeting) -> kernels::Result<()> {
        let ChunkSum { gradient, experts } = self;
        let (Some(own), Some(others)) = (experts.as_mut(), &right.experts) else {
            *experts = None;
            meeting.added.push((gradient.shallow_clone(), right.gradient.shallow_clone()));
            return Ok(());
        };
        let (all, theirs) = (gradient.f_view([-1])?, right.gradient.f_reshape([-1])?);
        let spans = own.spans.iter().map(|(expert, first, len)| {
            let [here, there] = [&all, &theirs].map(|all| all.f_narrow(0, *first, *len));
            kernels::Result::<_>::Ok((*expert, (here?, there?)))
        });
        own.present = match (&own.present, &others.present) {
            (Present::Known(here), Present::Known(there)) => {
                for span in spans {
                    let (expert, pair) = span?;
                    match (here[expert], there[expert]) {
                        (_, false) => {}
                        (true, true) => meeting.added.push(pair),
                        (false, true) => meeting.copied.push(pair),
                    }
                }
                Present::Known(here.iter().zip(there).map(|(here, there)| here | there).collect())
            }
            (here, there) => {
                let device = gradient.device();
                let (here, there) = (counts(here, device)?, counts(there, device)?);
                for span in spans {
                    let (expert, pair) = span?;
                    let [own, others] =
                        [&here, &there].map(|rows| rows.f_narrow(0, expert as i64, 1));
                    meeting.there.experts.push((pair, [own?, others?]));
                }
                let both = here.f_empty_like()?;
                meeting.there.rows.push([here, there, both.shallow_clone()]);
                Present::There(both)
            }
        };
        Ok(())
    }

    fn experts(gradient: Tensor, used: Present) -> ChunkSum {
        let whole = 0..gradient.numel() as i64;
        let experts = Used::of(used, gradient.numel() as i64, &[whole]);
        ChunkSum { gradient, experts: Some(experts) }
    }

    /// Some ranges of its numbers, one after the other in memory of their own.
    pub(crate) fn cut(&self, ranges: &[Range<i64>]) -> kernels::Result<ChunkSum> {
        let gradient = ChunkSum::numbers(std::slice::from_ref(self), ranges)?;
        let elements = self.gradient.numel() as i64;
        let experts =
            self.experts.as_ref().map(|used| Used::of(used.present.shared(), elements, ranges));
        Ok(ChunkSum { gradient, experts })
    }

    /// Those of each of some sums of one parameter.
    pub(crate) fn numbers(sums: &[ChunkSum], ranges: &[Range<i64>]) -> kernels::Result<Tensor> {
        let Some(first) = sums.first() else { return Ok(Tensor::default()) };
        let mut parts = Vec::with_capacity(sums.len() * ranges.len());
        for sum in sums {
            let all = sum.gradient.f_reshape([-1])?;
            for Range { start, end } in ranges {
                parts.push(all.f_narrow(0, *start, end - start)?);
            }
        }
        tree::joined(&parts, (first.gradient.kind(), first.gradient.device()))
    }
}

impl Used {
    /// A number for each expert, u8, on `device`: whether it had tokens.
    pub(crate) fn marks(&self, device: Device) -> kernels::Result<Tensor> {
        Ok(match &self.present {
            Present::Known(used) => {
                let marks: Vec<u8> = used.iter().map(|used| u8::from(*used)).collect();
                Tensor::f_from_slice(&marks)?.f_to_device(device)?
            }
            Present::There(counts) => counts.f_gt(0)?.f_to_kind(Kind::Uint8)?,
        })
    }

    /// What marks say that came from elsewhere: known where `like` is.
    pub(crate) fn marked(like: &Present, marks: &Tensor) -> Result<Present> {
        match like {
            Present::Known(_) => {
                let marks = crate::refusal::values::<u8>(marks)?;
                Ok(Present::Known(marks.into_iter().map(|mark| mark != 0).collect()))
            }
            Present::There(_) => Ok(Present::There(marks.f_to_kind(Kind::Int64).map_err(refused)?)),
        }
    }

    /// Of a stack of `elements` numbers in all, of which `ranges` stand here, one after the other.
    pub(crate) fn of(present: Present, elements: i64, ranges: &[Range<i64>]) -> Used {
        let (each, mut spans, mut at) = (elements / present.experts().max(1) as i64, Vec::new(), 0);
        for range in ranges {
            let mut first = range.start;
            while first < range.end {
                let expert = first / each;
                let end = range.end.min((expert + 1) * each);
                spans.push((expert as usize, at, end - first));
                (at, first) = (at + end - first, end);
            }
        }
        Used { present, spans }
    }
}

/// What is to be done where sums meet.
#[derive(Default)]
struct Meeting {
    added: Vec<(Tensor, Tensor)>,
    copied: Vec<(Tensor, Tensor)>,
    /// What the device alone knows how to add.
    there: tree::There,
}

impl Meeting {
    /// By a launch or two on a device.
    fn make(mut self) -> kernels::Result<()> {
        if self.there.experts.is_empty() {
            tree::add_all(&mut self.added)?;
        } else {
            self.there.added = self.added;
            self.there.make()?;
        }
        tree::copy_all(&mut self.copied)
    }
}

/// How many tokens experts had, as a device adds that up; only that they had some is asked for.
fn counts(present: &Present, device: Device) -> kernels::Result<Tensor> {
    Ok(match present {
        Present::There(counts) => counts.shallow_clone(),
        Present::Known(used) => {
            let used: Vec<i64> = used.iter().map(|used| i64::from(*used)).collect();
            Tensor::f_from_slice(&used)?.f_to_device(device)?
        }
    })
}

impl Sum for ChunkSum {
    type Error = kernels::Error;

    fn sum(mut self, right: ChunkSum) -> kernels::Result<ChunkSum> {
        let mut meeting = Meeting::default();
        self.takes(&right, &mut meeting)?;
        meeting.make()?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::ZayaConfig;
    use super::super::param::Declare;
    use super::*;

    /// Together or one by one, in whatever order chunks come: the same bits, to the sink in the same order.
    #[test]
    fn sums_that_are_made_together_are_those_made_one_by_one() {
        struct Order(Vec<(usize, Tensor)>);
        impl Sink for Order {
            fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()> {
                self.0.push((id.index(), gradient.wide().unwrap()));
                Ok(())
            }
        }
        let (config, mut specs) = (ZayaConfig::preset("zaya1-nano").unwrap(), Vec::new());
        let mut declare = Declare::new(&config, &mut specs);
        let ids = ["a", "b", "c"].map(|name| declare.matrix(name, name, [4, 5]));
        let dealt = Dealt::alone(6);
        let leaf = |id: ParamId, chunk: u64| {
            let gradient = crate::model::random(&[4, 5], 10 * chunk + id.index() as u64);
            let used: Vec<bool> =
                (0..4).map(|expert| !(expert + chunk).is_multiple_of(3)).collect();
            (gradient, (id == ids[1]).then_some(Present::Known(used)))
        };
        let (mut alone, mut together) = (Order(Vec::new()), Order(Vec::new()));
        let mut gradients = Gradients::new(&mut alone, dealt);
        let mut others = Gradients::new(&mut together, dealt);
        for chunks in [vec![5, 0, 3], vec![1, 4, 2]] {
            let mut parts = Vec::new();
            for (chunk, id) in
                chunks.iter().flat_map(|chunk| ids.iter().map(move |id| (*chunk, *id)))
            {
                let (gradient, used) = leaf(id, chunk);
                gradients.finished(id, Term::Only, chunk, gradient, used).unwrap();
                let (gradient, used) = leaf(id, chunk);
                parts.push(((id, Term::Only), chunk, ChunkSum::of(gradient, used).unwrap()));
            }
            others.together(parts).unwrap();
        }
        assert!(alone.0.len() == 3 && alone.0 == together.0);
    }

    /// -0.0 of an expert that one chunk used stays what it is; zero added to it would be 0.0.
    #[test]
    fn an_expert_without_tokens_is_absent() {
        let part = |values: [f32; 3], used: [bool; 3]| {
            let used = Present::Known(used.to_vec());
            ChunkSum::experts(Tensor::from_slice(&values).view([3, 1]), used)
        };
        let bits = |part: &ChunkSum| {
            let values = Vec::<f32>::try_from(part.gradient.reshape([-1])).unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let [left, right] = [[true, false, true], [false, false, true]];
        let sum = part([-0.0, 0.0, 1.0], left).sum(part([0.0, 0.0, 2.0], right)).unwrap();
        assert_eq!(bits(&sum), [-0.0f32, 0.0, 3.0].map(f32::to_bits));
        let used = sum.experts.as_ref().map(|used| &used.present);
        assert!(matches!(used, Some(Present::Known(used)) if *used == [true, false, true]));
        let sum = part([0.0, 0.0, 2.0], right).sum(part([-0.0, 0.0, 1.0], left)).unwrap();
        assert_eq!(bits(&sum), [-0.0f32, 0.0, 3.0].map(f32::to_bits));
    }
}
