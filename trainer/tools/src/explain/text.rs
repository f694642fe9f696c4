//! An explanation for people: the sentence, then the evidence.

use std::fmt::{Display, Formatter, Result};

use contract::terminal;

use super::{DocumentEvidence, Explanation, NormEvidence, Removal, WorstToken};
use curriculum::stats::Deviation;
use trainer::optim::guard::Skipped;

impl Display for Explanation {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        writeln!(out, "step {}: {}", self.step, self.sentence)?;
        self.numbers(out)?;
        self.write_documents(out)?;
        self.write_tokens(out)?;
        self.write_removals(out)?;
        self.write_layers(out)?;
        self.write_activities(out)?;
        self.write_changes(out)?;
        match self.next.as_slice() {
            [] => Ok(()),
            next => writeln!(out, "\nnext:\n  {}", next.join("\n  ")),
        }
    }
}

impl Explanation {
    fn numbers(&self, out: &mut Formatter<'_>) -> Result {
        let before = |value: Option<f64>| {
            value.map_or_else(String::new, |value| {
                format!(" (median of {} steps before {value:.4})", self.window)
            })
        };
        writeln!(out, "\n  replay         {}: {}", self.verdict.words(), self.advice)?;
        if let Some(bits) = &self.bits {
            writeln!(
                out,
                "  first differs  {}: ledger {}, here {}",
                bits.first.quantity, bits.first.left, bits.first.right
            )?;
        }
        if let Some(why) = &self.diverged {
            writeln!(out, "  diverges       {}", why.replace('\n', "\n                 "))?;
        }
        let far = |found: &Option<Deviation>| {
            found.map_or_else(String::new, |found| format!(" [{:+.1} spreads]", found.score))
        };
        let (loss, norm) = (before(self.loss_before), before(self.norm_before));
        writeln!(out, "  loss           {:.4}{loss}{}", self.loss, far(&self.moved.loss))?;
        for (source, found) in &self.moved.sources {
            let source = terminal::name(source);
            writeln!(
                out,
                "    of {source:<9} usually {:.4} [{:+.1} spreads]",
                found.usual, found.score
            )?;
        }
        writeln!(out, "  gradient norm  {:.4}{norm}{}", self.norm, far(&self.moved.norm))?;
        if let Some(times) = self.moved.update {
            let times = if times < 1e6 { format!("{times:.2}") } else { format!("{times:.1e}") };
            writeln!(
                out,
                "  updates        {times} times their median, this one or the one before"
            )?;
        }
        if let Some(speed) = &self.speed {
            writeln!(out, "  speed          {}", terminal::name(&speed.words()))?;
        }
        if let Some(next) = self.next_loss {
            writeln!(out, "  next step      loss {next:.4}")?;
        }
        // Values that round to zero are shown without a sign.
        let nats = |nats: f64| if nats.abs() < 0.005 { 0.0 } else { nats };
        let left = &self.unexplained;
        let named = self.tokens.len();
        writeln!(
            out,
            "  unexplained    outside the top {}: {:+.2} of {:+.2} nats of excess loss, {:.1} % of the gradient; in no \
             document: {:.1e} of the gradient",
            contract::counted(named, "document"),
            nats(left.excess_left),
            nats(left.excess),
            100.0 * left.gradient_left,
            left.gradient.abs()
        )
    }

    fn write_documents(&self, out: &mut Formatter<'_>) -> Result {
        let (shown, all) = (self.tokens.len(), self.documents.len());
        writeln!(out, "\ndocuments, worst first ({shown} of {all}):")?;
        writeln!(
            out,
            "{:>7} {:>7} {:>10} {:>10} {:>10} {:>7} {:>7}  source | file:row (bytes) | id",
            "score", "labels", "loss/label", "excess", "|gradient|", "cosine", "share"
        )?;
        for evidence in &self.documents[..shown] {
            let document = &evidence.document;
            let weight =
                document.loss_weight.as_ref().map(|weight| format!(" (loss weight {weight})"));
            let weight = weight.unwrap_or_default();
            writeln!(
                out,
                "{:>7.3} {:>7} {:>10.4} {:>+10.2} {:>10.4} {:>+7.3} {:>6.1}%  {}{} | {} | {}",
                evidence.score,
                document.labels,
                document.mean,
                evidence.excess,
                evidence.gradient_norm,
                evidence.alignment,
                100.0 * evidence.gradient_share,
                terminal::name(&document.source),
                weight,
                place(evidence),
                short(&document.id)
            )?;
        }
        Ok(())
    }

    fn write_tokens(&self, out: &mut Formatter<'_>) -> Result {
        for (evidence, tokens) in
            self.documents.iter().zip(&self.tokens).filter(|(_, tokens)| !tokens.is_empty())
        {
            writeln!(out, "\nworst tokens of {}:", short(&evidence.document.id))?;
            for WorstToken { token, row, loss, text: [before, worst, after], .. } in tokens {
                let line = format!("{before}[[{worst}]]{after}").replace(['\n', '\r', '\t'], " ");
                let token = token.map_or("a sentinel".to_owned(), |token| format!("token {token}"));
                writeln!(out, "{loss:>10.3}  {token}, row {row}: {line}")?;
            }
        }
        Ok(())
    }

    fn write_removals(&self, out: &mut Formatter<'_>) -> Result {
        if self.removals.is_empty() {
            return Ok(());
        }
        writeln!(out, "\nWHAT IF, not a replay: the step without")?;
        writeln!(
            out,
            "{:>10} {:>10} {:>10} {:>7}  document",
            "loss", "norm", "next loss", "labels"
        )?;
        let number = |value: Option<f64>| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.4}"))
        };
        writeln!(
            out,
            "{:>10.4} {:>10.4} {:>10} {:>7}  (nothing: as it was)",
            self.loss,
            self.norm,
            number(self.next_loss),
            0
        )?;
        for Removal { documents, labels, loss, norm, skipped, next_loss } in &self.removals {
            let names = match documents.as_slice() {
                [id] => short(id),
                all => format!("all {} of them", all.len()),
            };
            writeln!(
                out,
                "{loss:>10.4} {:>10} {:>10} {labels:>7}  {names}{}",
                number(*norm),
                number(*next_loss),
                Skipped::note(*skipped)
            )?;
        }
        Ok(())
    }

    fn write_layers(&self, out: &mut Formatter<'_>) -> Result {
        if self.layers.is_empty() {
            return Ok(());
        }
        writeln!(out, "\nlayers (x: times the median of {} steps before):", self.window)?;
        writeln!(
            out,
            "{:>12} {:>11} {:>7} {:>11} {:>7} {:>12} {:>9} {:>8} {:>9}",
            "",
            "|gradient|",
            "x",
            "|update|",
            "x",
            "update/weight",
            "x before",
            "router",
            "logits <="
        )?;
        for layer in &self.layers {
            let number =
                layer.name.strip_prefix("layer ").and_then(|number| number.parse::<usize>().ok());
            let router =
                number.and_then(|number| self.routers.iter().find(|router| router.layer == number));
            let heat = number.and_then(|number| {
                self.temperatures.iter().find(|attention| attention.layer == number)
            });
            let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
            writeln!(
                out,
                "{:>12} {:>11.4e} {:>7} {:>11.4e} {:>7} {:>12.3e} {:>9} {:>8} {:>9}",
                layer.name,
                layer.gradient.norm,
                times(&layer.gradient),
                layer.update.norm,
                times(&layer.update),
                layer.update.norm / layer.weights.max(f64::MIN_POSITIVE),
                or_dash(layer.update_before.as_ref().map(times)),
                or_dash(router.map(|router| format!("{:.3}", router.entropy))),
                or_dash(heat.map(|attention| format!("{:.2}", attention.largest_logit))),
            )?;
        }
        Ok(())
    }

    fn write_activities(&self, out: &mut Formatter<'_>) -> Result {
        writeln!(out, "\nin the layers, root mean squares of the step:")?;
        writeln!(
            out,
            "{:>12} {:>11} {:>11} {:>12} {:>13}",
            "", "residual", "attention", "feed-forward", "largest logit"
        )?;
        for activity in &self.activities {
            let name = format!("layer {}", activity.layer);
            let logit = activity
                .largest_logit
                .map_or_else(|| "-".to_owned(), |logit| format!("{logit:.3}"));
            writeln!(
                out,
                "{name:>12} {:>11.4e} {:>11.4e} {:>12.4e} {logit:>13}",
                activity.residual, activity.attention, activity.feed_forward
            )?;
        }
        Ok(())
    }

    fn write_changes(&self, out: &mut Formatter<'_>) -> Result {
        writeln!(out, "\nchanged since step {}:", self.step.saturating_sub(self.window))?;
        for change in &self.changes {
            writeln!(out, "  {}: {}", change.kind.words(), change.what)?;
        }
        let still = super::RunChangeKind::ALL
            .iter()
            .filter(|kind| self.changes.iter().all(|change| change.kind != **kind));
        let still: Vec<&str> = still.map(|kind| kind.words()).collect();
        writeln!(out, "  nothing of: {}", still.join(", "))
    }
}

fn times(norm: &NormEvidence) -> String {
    norm.times().map_or_else(|| "-".to_owned(), |times| format!("{times:.2}"))
}

/// "web.jsonl:17 (204..511)".
fn place(evidence: &DocumentEvidence) -> String {
    let document = &evidence.document;
    let group = document.group.map_or_else(String::new, |group| format!("group {group} row "));
    let bytes = document.bytes.map_or_else(String::new, |(from, to)| format!(" ({from}..{to})"));
    format!("{}:{group}{}{bytes}", terminal::name(&document.file), document.row)
}

/// A shortened id: very long ones show only both ends. The commands contain it in full.
pub(super) fn short(id: &str) -> String {
    const ENDS: usize = 48;
    let shown: Vec<char> = terminal::name(id).chars().collect();
    if shown.len() <= 2 * ENDS {
        return shown.into_iter().collect();
    }
    let (head, tail) = (&shown[..ENDS], &shown[shown.len() - ENDS..]);
    head.iter().chain(&['\u{2026}']).chain(tail).collect()
}
