//! Fetches weight shards from other ranks: the next shard is received while a layer uses the current one.

use kernels::Result;
use tch::Tensor;

use super::fold::ShardedWeights;
use super::layer::Pass;
use super::line::PendingReceive;
use super::param::ParamId;

/// A shard of a weight that is being fetched.
pub(super) struct Shard<'a> {
    shape: Vec<i64>,
    /// The shard if this rank holds it, otherwise empty.
    own: Tensor,
    coming: Option<Box<dyn PendingReceive + 'a>>,
    /// The other rank that holds it.
    from: Option<usize>,
}

impl<'a> Pass<'a> {
    /// Begins to fetch a shard of a weight; all ranks fetch the same ones in the same order.
    pub(super) fn fetch(
        &self,
        ShardedWeights { fold, line }: ShardedWeights<'a>,
        id: ParamId,
        shard: i64,
    ) -> Result<Shard<'a>> {
        let row = &self.weights[id];
        let Some(cut) = fold.cut(id.index()) else {
            let reason = format!("parameter {} is not cut into shards", id.index());
            return Err(kernels::Error::Foreign { call: "hand over a shard", reason });
        };
        let (holder, shape) = (fold.holder(cut, shard), cut.shape_of(fold.shards, shard));
        let length = cut.length(fold.shards, shard);
        let held = fold.held(cut).into_iter().find(|held| held.shard == shard);
        let nothing = || row.f_narrow(0, 0, 0);
        let own = held.map_or_else(nothing, |held| row.f_narrow(0, held.first, length))?;
        let from = (holder != fold.place && length > 0).then_some(holder as usize);
        if length == 0 {
            return Ok(Shard { shape, own, coming: None, from });
        }
        let mut take = vec![0; fold.degree as usize];
        from.iter().for_each(|from| take[*from] = length);
        let give: Vec<Tensor> = take.iter().map(|_| own.shallow_clone()).collect();
        let coming = Some(line.begin("a shard of weights", &give, &take, row.kind())?);
        Ok(Shard { shape, own, coming, from })
    }
}

impl Shard<'_> {
    /// Waits until the shard has been received, or sent.
    pub(super) fn wait(self) -> Result<Tensor> {
        let Shard { shape, own, coming, from } = self;
        let mut found = coming.map_or_else(|| Ok(Vec::new()), PendingReceive::wait)?;
        let whole = from.map_or(own, |from| found.swap_remove(from));
        Ok(whole.f_view(shape.as_slice())?)
    }
}

/// The shards of some weights, in order: the next one is fetched while one is used.
pub(super) struct Shards<'a, 'b, const N: usize> {
    pass: &'b Pass<'a>,
    ids: [ParamId; N],
    count: i64,
    /// The index of the next shard.
    at: i64,
    /// The next shards, being fetched.
    coming: Vec<Shard<'a>>,
}

impl<'a, 'b, const N: usize> Shards<'a, 'b, N> {
    /// For weights that are cut into `count` shards each.
    pub(super) fn new(pass: &'b Pass<'a>, ids: [ParamId; N], count: i64) -> Result<Self> {
        let mut shards = Shards { pass, ids, count, at: 0, coming: Vec::new() };
        shards.coming = shards.fetch()?;
        Ok(shards)
    }

    /// Begins to fetch the next shards, if any.
    fn fetch(&self) -> Result<Vec<Shard<'a>>> {
        match self.pass.folded.filter(|_| self.at < self.count) {
            None => Ok(Vec::new()),
            Some(folded) => {
                self.ids.iter().map(|id| self.pass.fetch(folded, *id, self.at)).collect()
            }
        }
    }

    /// The next shard of each weight, in the order of `ids`; `None` where weights are whole.
    pub(super) fn next(&mut self) -> Result<Option<[Tensor; N]>> {
        let coming = std::mem::take(&mut self.coming);
        self.at += 1;
        self.coming = self.fetch()?;
        let found = coming.into_iter().map(Shard::wait).collect::<Result<Vec<_>>>()?;
        Ok(found.try_into().ok())
    }
}
