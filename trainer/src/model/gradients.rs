//! Parameter gradients: computed for each chunk of a micro-batch, added over chunks, passed to the sink.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::{Fault, Result};
use kernels::addend::Addend;
use kernels::ops::{OpsTable, ParamGradient, UsedExperts};
use kernels::shapes;
use kernels::tree::{self, Node, Pair, Sum, TreeNodes, blocks};
use tch::{Device, Kind, Tensor};

use super::line::Assignment;
use super::param::ParamId;
use crate::refusal::refused;

/// Takes each gradient as soon as it is computed.
pub trait GradientSink {
    /// Takes the gradient of the loss divided by the label count for parameter `id`, in its shape.
    ///
    /// Each parameter has exactly one per micro-batch; their order is unspecified.
    fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()>;

    /// Takes the sums over the local chunks where other ranks of a line have the other chunks: their blocks in the
    /// tree, in its order. All ranks pass the same parameters in the same order.
    fn part(&mut self, id: ParamId, _: GradientTerm, _: Vec<ChunkSum>) -> Result<()> {
        Err(Fault::bug(format!("no layer adds up the parts of parameter {}", id.index())))
    }
}

/// Collects all gradients of a micro-batch.
#[derive(Debug, Default)]
pub struct CollectedGradients(Vec<Option<Tensor>>);

impl CollectedGradients {
    /// The gradients in canonical order.
    pub(crate) fn into_vec(self) -> Result<Vec<Tensor>> {
        let missing = || Fault::bug("a parameter has no gradient");
        self.0.into_iter().map(|gradient| gradient.ok_or_else(missing)).collect()
    }
}

impl GradientSink for CollectedGradients {
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

/// Largest gradient on a device, in elements, that waits for the end of a layer to be added together with others. A
/// larger one is worth a separate launch, and its memory should be released early.
const SMALL: usize = 1 << 20;

/// Bytes of gradients that wait for later layers to be added together with theirs: less than the backward pass of a
/// layer frees.
const MANY: usize = 1 << 27;

/// Adds the gradients of the local chunks; passes each parameter's sum to the sink after its last chunk.
pub(super) struct Gradients<'a> {
    sink: &'a mut dyn GradientSink,
    dealt: Assignment,
    /// The local chunks, in the order of the sequence.
    own: Vec<u64>,
    waiting: BTreeMap<Key, PartialSum>,
    /// First terms that wait for second ones, where all chunks are local.
    first: FirstTerms,
    /// Gradients to be added at the end of a layer.
    begun: Vec<PendingGradient>,
    /// Memory of what these are computed from.
    begun_bytes: usize,
}

/// A chunk's gradient of a parameter, before it is added.
struct PendingGradient {
    id: ParamId,
    term: GradientTerm,
    chunk: u64,
    gradient: ParamGradient,
    /// For stacked experts: which had tokens. This decides the sum over chunks.
    used: Option<UsedExperts>,
}

/// The gradients as one chunk adds to them.
pub(super) struct ChunkGradients<'a, 'b> {
    all: &'a mut Gradients<'b>,
    chunk: u64,
}

/// Which of a parameter's gradient terms, each a sum over chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GradientTerm {
    /// The only term.
    Only,
    /// The first of two terms.
    First,
    /// The second of two terms, complete after the first.
    Second,
}

/// First terms of gradients whose second terms are not there yet.
#[derive(Default)]
pub(crate) struct FirstTerms(BTreeMap<usize, Tensor>);

impl FirstTerms {
    /// The gradient of parameter `id` once all of its terms are there; `term` is one of them, summed over chunks.
    pub(crate) fn join(
        &mut self,
        id: ParamId,
        term: GradientTerm,
        sum: Tensor,
    ) -> Result<Option<Tensor>> {
        match term {
            GradientTerm::Only => Ok(Some(sum)),
            GradientTerm::First => {
                self.0.insert(id.index(), sum);
                Ok(None)
            }
            GradientTerm::Second => {
                let first = self.0.remove(&id.index()).ok_or_else(missing_chunk)?;
                first.sum(sum).map(Some).map_err(refused)
            }
        }
    }
}

/// A gradient, or one of its terms.
type Key = (ParamId, GradientTerm);

/// A sum over the local chunks.
struct PartialSum {
    nodes: TreeNodes<ChunkSum>,
    missing: u64,
}

/// A chunk's gradient of a parameter, or the sum over a block of chunks in the tree.
#[derive(Debug)]
pub struct ChunkSum {
    /// The numbers, f32: in the parameter's shape, or some of them flat.
    pub(crate) gradient: Tensor,
    /// For stacked experts, which of them had tokens.
    pub(crate) experts: Option<ExpertNumbers>,
}

/// Which experts had tokens, and where their numbers are.
#[derive(Debug)]
pub(crate) struct ExpertNumbers {
    /// The experts that had tokens.
    pub(crate) present: UsedExperts,
    /// Runs of one expert's numbers: the expert, the offset, the length.
    spans: Vec<(usize, i64, i64)>,
}

impl<'a> Gradients<'a> {
    /// Passes gradients to `sink`; `dealt` says which chunks are local.
    pub(super) fn new(sink: &'a mut dyn GradientSink, dealt: Assignment) -> Self {
        let (waiting, first) = (BTreeMap::new(), FirstTerms::default());
        let (own, begun) = (dealt.own(), Vec::new());
        Gradients { sink, dealt, own, waiting, first, begun, begun_bytes: 0 }
    }

    /// Where the `at`-th local chunk adds its gradients.
    pub(super) fn of(&mut self, at: usize) -> ChunkGradients<'_, 'a> {
        let chunk = self.own[at];
        ChunkGradients { all: self, chunk }
    }

    /// At the end of a layer, the same if the pending gradients take much memory.
    pub(super) fn settle_many(&mut self, ops: OpsTable) -> Result<()> {
        match self.begun_bytes {
            0..MANY => Ok(()),
            _ => self.settle(ops),
        }
    }

    /// Adds the pending gradients, all at once, and passes them on.
    pub(super) fn settle(&mut self, ops: OpsTable) -> Result<()> {
        self.begun_bytes = 0;
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

    /// Adds many gradients of chunks: pairs that meet in the tree are added by one launch.
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

    /// The sum over the local chunks for a gradient.
    fn waiting(&mut self, key: Key) -> &mut PartialSum {
        let leaves = self.dealt.leaves(self.dealt.place);
        let missing = leaves.end - leaves.start;
        let begin = || PartialSum { nodes: TreeNodes::new(&[leaves]), missing };
        self.waiting.entry(key).or_insert_with(begin)
    }

    /// Passes on a gradient that is already summed over chunks.
    pub(super) fn whole(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        self.sink.gradient(id, gradient.into())
    }

    /// With a single chunk, passes the gradient on at once, as it is. With several, f32 sums: in main memory at once;
    /// on a device together with others at the end of a layer, except for large ones that are f32 already.
    fn take(&mut self, begun: PendingGradient) -> Result<()> {
        let PendingGradient { id, term, chunk, gradient, used } = begun;
        let gradient = match gradient {
            ParamGradient::Made(made) if self.at_once(&made) => {
                let made = made.f_to_kind(Kind::Float).map_err(refused)?;
                return self.together(vec![((id, term), chunk, ChunkSum::of(made, used)?)]);
            }
            gradient if self.dealt.chunks == 1 => match Addend::try_from(gradient) {
                Ok(gradient) => return self.sink.gradient(id, gradient),
                Err(gradient) => gradient,
            },
            gradient => gradient,
        };
        self.begun_bytes += gradient.bytes();
        self.begun.push(PendingGradient { id, term, chunk, gradient, used });
        Ok(())
    }

    fn at_once(&self, made: &Tensor) -> bool {
        let large = made.kind() == Kind::Float && made.numel() > SMALL;
        self.dealt.chunks > 1 && (!shapes::queues(made.device()) || large)
    }

    /// Called when all local chunks have been added.
    fn complete(&mut self, key: Key) -> Result<()> {
        let (id, term) = key;
        let mut sum = self.waiting.remove(&key).ok_or_else(missing_chunk)?.nodes;
        if self.dealt.degree > 1 {
            let leaves = self.dealt.leaves(self.dealt.place);
            let blocks = blocks(leaves.start, leaves.end).into_iter();
            let blocks = blocks.map(|(_, first)| sum.take(first).ok_or_else(missing_chunk));
            return self.sink.part(id, term, blocks.collect::<Result<_>>()?);
        }
        let gradient = sum.finish().map_err(refused)?.ok_or_else(missing_chunk)?.gradient;
        match self.first.join(id, term, gradient)? {
            Some(gradient) => self.whole(id, gradient),
            None => Ok(()),
        }
    }
}

/// The sums of pairs, each with the bits of [`Sum`], by one or two launches in all.
fn added(pairs: Vec<(Key, Pair<ChunkSum>)>) -> Result<Vec<(Key, Node<ChunkSum>)>> {
    let (mut meeting, mut nodes) = (LaunchBatch::default(), Vec::with_capacity(pairs.len()));
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
    /// Adds the gradient of stacked experts; `used` says which had tokens. The others are not summed over chunks.
    pub(super) fn experts(
        &mut self,
        id: ParamId,
        gradient: ParamGradient,
        used: UsedExperts,
    ) -> Result<()> {
        let (term, chunk, used) = (GradientTerm::Only, self.chunk, Some(used));
        self.all.take(PendingGradient { id, term, chunk, gradient, used })
    }

    /// Adds one of several terms of a gradient.
    pub(super) fn term(
        &mut self,
        id: ParamId,
        term: GradientTerm,
        gradient: ParamGradient,
    ) -> Result<()> {
        let chunk = self.chunk;
        self.all.take(PendingGradient { id, term, chunk, gradient, used: None })
    }
}

/// Adds a chunk's gradient of a parameter.
pub(super) fn emit(
    sink: &mut ChunkGradients<'_, '_>,
    id: ParamId,
    gradient: impl Into<ParamGradient>,
) -> Result<()> {
    sink.term(id, GradientTerm::Only, gradient.into())
}

impl ChunkSum {
    /// Of one chunk; for stacked experts, `used` says which had tokens.
    fn of(gradient: Tensor, used: Option<UsedExperts>) -> Result<ChunkSum> {
        let Some(used) = used else { return Ok(ChunkSum { gradient, experts: None }) };
        Ok(ChunkSum::experts(gradient.f_contiguous().map_err(refused)?, used))
    }

    /// Queues in `meeting` which numbers of `right` are added to its own and which are copied; marks the experts of
    /// both as used. An expert that had tokens in only one of them is copied, never added to zero.
    fn takes(&mut self, right: &ChunkSum, meeting: &mut LaunchBatch) -> kernels::Result<()> {
        let ChunkSum { gradient, experts } = self;
        let (Some(own), Some(others)) = (experts.as_mut(), &right.experts) else {
            *experts = None;
            meeting.added.push((gradient.shallow_clone(), right.gradient.shallow_clone()));
            return Ok(());
        };
        let (all, right_values) = (gradient.f_view([-1])?, right.gradient.f_reshape([-1])?);
        let spans = own.spans.iter().map(|(expert, first, len)| {
            let [here, there] = [&all, &right_values].map(|all| all.f_narrow(0, *first, *len));
            kernels::Result::<_>::Ok((*expert, (here?, there?)))
        });
        own.present = match (&own.present, &others.present) {
            (UsedExperts::Known(here), UsedExperts::Known(there)) => {
                for span in spans {
                    let (expert, pair) = span?;
                    match (here[expert], there[expert]) {
                        (_, false) => {}
                        (true, true) => meeting.added.push(pair),
                        (false, true) => meeting.copied.push(pair),
                    }
                }
                UsedExperts::Known(
                    here.iter().zip(there).map(|(here, there)| here | there).collect(),
                )
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
                UsedExperts::There(both)
            }
        };
        Ok(())
    }

    fn experts(gradient: Tensor, used: UsedExperts) -> ChunkSum {
        let whole = 0..gradient.numel() as i64;
        let experts = ExpertNumbers::of(used, gradient.numel() as i64, &[whole]);
        ChunkSum { gradient, experts: Some(experts) }
    }

    /// Copies some ranges of its numbers, one after the other.
    pub(crate) fn cut(&self, ranges: &[Range<i64>]) -> kernels::Result<ChunkSum> {
        let gradient = ChunkSum::numbers(std::slice::from_ref(self), ranges)?;
        let elements = self.gradient.numel() as i64;
        let experts = self
            .experts
            .as_ref()
            .map(|used| ExpertNumbers::of(used.present.shared(), elements, ranges));
        Ok(ChunkSum { gradient, experts })
    }

    /// The same ranges of each of several sums of one parameter.
    pub(crate) fn numbers(sums: &[ChunkSum], ranges: &[Range<i64>]) -> kernels::Result<Tensor> {
        let Some(first) = sums.first() else { return Ok(Tensor::default()) };
        let mut parts = Vec::with_capacity(sums.len() * ranges.len());
        for sum in sums {
            let all = sum.gradient.f_reshape([-1])?;
            for Range { start, end } in ranges {
                parts.push(all.f_narrow(0, *start, end - start)?);
            }
        }
        tree::joined(&parts, first.gradient.kind(), first.gradient.device())
    }
}

impl ExpertNumbers {
    /// One u8 for each expert, on `device`: whether it had tokens.
    pub(crate) fn marks(&self, device: Device) -> kernels::Result<Tensor> {
        Ok(match &self.present {
            UsedExperts::Known(used) => {
                let marks: Vec<u8> = used.iter().map(|used| u8::from(*used)).collect();
                Tensor::f_from_slice(&marks)?.f_to_device(device)?
            }
            UsedExperts::There(counts) => counts.f_gt(0)?.f_to_kind(Kind::Uint8)?,
        })
    }

    /// From the marks of another rank; on the host if `like` is.
    pub(crate) fn marked(like: &UsedExperts, marks: &Tensor) -> Result<UsedExperts> {
        match like {
            UsedExperts::Known(_) => {
                let marks = crate::refusal::values::<u8>(marks)?;
                Ok(UsedExperts::Known(marks.into_iter().map(|mark| mark != 0).collect()))
            }
            UsedExperts::There(_) => {
                Ok(UsedExperts::There(marks.f_to_kind(Kind::Int64).map_err(refused)?))
            }
        }
    }

    /// For a stack of `elements` numbers, of which only `ranges` are stored, one after the other.
    pub(crate) fn of(present: UsedExperts, elements: i64, ranges: &[Range<i64>]) -> ExpertNumbers {
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
        ExpertNumbers { present, spans }
    }
}

/// The additions and copies of a launch.
#[derive(Default)]
struct LaunchBatch {
    added: Vec<(Tensor, Tensor)>,
    copied: Vec<(Tensor, Tensor)>,
    /// Additions that depend on counts on the device.
    there: tree::DeviceSums,
}

impl LaunchBatch {
    /// Runs them; on a device by one or two launches.
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

/// The token counts of experts, as a device adds them; only whether they are zero matters.
fn counts(present: &UsedExperts, device: Device) -> kernels::Result<Tensor> {
    Ok(match present {
        UsedExperts::There(counts) => counts.shallow_clone(),
        UsedExperts::Known(used) => {
            let used: Vec<i64> = used.iter().map(|used| i64::from(*used)).collect();
            Tensor::f_from_slice(&used)?.f_to_device(device)?
        }
    })
}

impl Sum for ChunkSum {
    type Error = kernels::Error;

    fn sum(mut self, right: ChunkSum) -> kernels::Result<ChunkSum> {
        let mut meeting = LaunchBatch::default();
        self.takes(&right, &mut meeting)?;
        meeting.make()?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::ZayaConfig;
    use super::super::param::ParamDeclarations;
    use super::*;

    /// Added together or one by one, in any order of chunks: the same bits, passed to the sink in the same order.
    #[test]
    fn sums_that_are_made_together_are_those_made_one_by_one() {
        struct Order(Vec<(usize, Tensor)>);
        impl GradientSink for Order {
            fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()> {
                self.0.push((id.index(), gradient.wide().unwrap()));
                Ok(())
            }
        }
        let (config, mut specs) = (ZayaConfig::preset("zaya1-nano").unwrap(), Vec::new());
        let mut declare = ParamDeclarations::new(&config, &mut specs);
        let ids = ["a", "b", "c"].map(|name| declare.matrix(name, name, [4, 5]));
        let dealt = Assignment::alone(6);
        let leaf = |id: ParamId, chunk: u64| {
            let gradient = crate::model::random(&[4, 5], 10 * chunk + id.index() as u64);
            let used: Vec<bool> =
                (0..4).map(|expert| !(expert + chunk).is_multiple_of(3)).collect();
            (gradient, (id == ids[1]).then_some(UsedExperts::Known(used)))
        };
        let (mut alone, mut together) = (Order(Vec::new()), Order(Vec::new()));
        let mut gradients = Gradients::new(&mut alone, dealt);
        let mut others = Gradients::new(&mut together, dealt);
        let mut trees = ids.map(|_| TreeNodes::new(&[dealt.leaves(0)]));
        for chunks in [vec![5, 0, 3], vec![1, 4, 2]] {
            let mut parts = Vec::new();
            for (chunk, id) in
                chunks.iter().flat_map(|chunk| ids.iter().map(move |id| (*chunk, *id)))
            {
                let part = || {
                    let (gradient, used) = leaf(id, chunk);
                    ChunkSum::of(gradient, used).unwrap()
                };
                let key = (id, GradientTerm::Only);
                gradients.together(vec![(key, chunk, part())]).unwrap();
                parts.push((key, chunk, part()));
                trees[id.index()].push(dealt.leaf(chunk), part()).unwrap();
            }
            others.together(parts).unwrap();
        }
        let trees = trees.map(|tree| tree.finish().unwrap().unwrap().gradient);
        assert!(together.0.iter().zip(&trees).all(|((_, one), tree)| one == tree));
        assert!(alone.0.len() == 3 && alone.0 == together.0);
    }

    /// -0.0 of an expert that only one chunk used is preserved; adding zero would make it 0.0.
    #[test]
    fn an_expert_without_tokens_is_absent() {
        let part = |values: [f32; 3], used: [bool; 3]| {
            let used = UsedExperts::Known(used.to_vec());
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
        assert!(matches!(used, Some(UsedExperts::Known(used)) if *used == [true, false, true]));
        let sum = part([0.0, 0.0, 2.0], right).sum(part([-0.0, 0.0, 1.0], left)).unwrap();
        assert_eq!(bits(&sum), [-0.0f32, 0.0, 3.0].map(f32::to_bits));
    }
}
