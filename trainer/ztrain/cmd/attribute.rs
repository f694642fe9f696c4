//! What `ztrain replay --attribute` says.

use contract::Result;
use contract::terminal::{name, print_raw};
use tools::replay::attribute::Attribution;

/// Prints the documents with what leaving them out does to the target, and how well that was predicted.
pub(crate) fn print(found: &Attribution, json: bool) -> Result<()> {
    if json {
        let mut answer = serde_json::json!(found);
        answer["replay"] = false.into();
        return print_raw(&format!("{answer}\n"));
    }
    let Attribution { first, target, loss, predicted_step, documents, subsets, lds, lds_dot } =
        found;
    let left_out = contract::words::steps(*first, target - 1);
    print_line!("WHAT IF, not a replay: documents of step {first} left out of {left_out}");
    print_line!(
        "target: the loss of step {target}'s batch after them, {loss:.6} with all documents"
    );
    print_line!("step {first} as a whole is predicted to change it by {predicted_step:+.6}");
    print_line!(
        "{:>12} {:>12} {:>12} {:>7}  source | id",
        "changes by",
        "predicted",
        "gradients",
        "labels"
    );
    for one in documents {
        print_line!(
            "{:>+12.6} {:>+12.6} {:>+12.6} {:>7}  {} | {}",
            one.actual,
            one.predicted,
            one.dot,
            one.labels,
            name(&one.source),
            name(&one.id)
        );
    }
    match lds {
        Some(lds) => print_line!(
            "rank correlation of change and prediction over {} subsets, each without half of them (LDS): {lds:.3}",
            subsets.len()
        ),
        None => print_line!("no rank correlation: too few subsets, or no change to rank"),
    }
    if let Some(lds) = lds_dot {
        print_line!(
            "the same of dot products of gradients at the state before step {first}: {lds:.3}"
        );
    }
    Ok(())
}
