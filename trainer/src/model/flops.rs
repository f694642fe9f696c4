//! How many floating-point operations a leaf is worth: the products that the model defines, whatever computes them.
//!
//! A product of m x k and k x n is 2 m k n. Counted are projections, the grouped convolution, the causal half of attention
//! inside each document, the router, the one expert of each routed token, and the head; norms, activations and the
//! optimizer are not. The backward pass is twice the forward pass. Recomputation would not count.

use super::ZayaConfig;

/// Operations of forward and backward.
///
/// `tokens` in all, `routed` (token, layer) pairs that went to an expert, `pairs` (query, key) pairs that see each other.
pub fn training(config: &ZayaConfig, tokens: u64, routed: u64, pairs: u64) -> f64 {
    3.0 * forward(config, tokens as f64, routed as f64, pairs as f64)
}

fn forward(config: &ZayaConfig, tokens: f64, routed: f64, pairs: f64) -> f64 {
    let f = |size: i64| size as f64;
    let (width, query, key) = (f(config.hidden_size), f(config.query_size()), f(config.key_size()));
    // Queries, keys, both halves of the values, and the way out.
    let projections = width * (query + key + key + query);
    let convolution = f(config.conv_size()) * f(config.head_dim) * 2.0;
    let state = f(config.router_hidden_size);
    let router = width * state + 2.0 * state * state + state * f(config.router_classes());
    let attention = 2.0 * query * pairs;
    let expert = 3.0 * width * f(config.moe_intermediate_size);
    let layer = tokens * (projections + convolution + router) + attention;
    let head = tokens * width * f(config.vocab_size);
    2.0 * (f(config.num_hidden_layers) * layer + routed * expert + head)
}

/// (query, key) pairs of documents that begin at `starts` in a row of `length` tokens.
pub fn causal_pairs(starts: &[u32], length: u32) -> u64 {
    let ends = starts.iter().skip(1).copied().chain([length]);
    starts
        .iter()
        .zip(ends)
        .map(|(start, end)| u64::from(end - start))
        .map(|n| n * (n + 1) / 2)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::super::parameters;
    use super::*;

    /// Six operations for each token and active weight, plus attention: the rule of thumb, on matrices alone.
    #[test]
    fn it_is_six_for_each_active_weight_and_token() {
        let config = ZayaConfig::preset("zaya1-8b").unwrap();
        let experts = config.num_experts as u64;
        let active: u64 = parameters(&config)
            .iter()
            .filter(|spec| spec.shape.len() > 1 && !spec.name.contains("depthwise"))
            .map(|spec| {
                if spec.name.contains(".experts.") {
                    spec.elements() / experts
                } else {
                    spec.elements()
                }
            })
            .sum();
        let (tokens, layers) = (1000, config.num_hidden_layers as u64);
        let found = training(&config, tokens, tokens * layers, 0);
        assert_eq!(found, 6.0 * active as f64 * tokens as f64);
        let with = training(&config, tokens, tokens * layers, 10);
        // Scores and values: 2 x 2 x query width for a pair, in each layer, three times.
        assert_eq!(with - found, (12 * config.query_size() as u64 * 10 * layers) as f64);
    }

    #[test]
    fn pairs_are_counted_within_documents() {
        for (starts, length) in [(vec![0], 7), (vec![0, 1, 4], 9), (vec![0, 8], 9)] {
            let document = |place: u32| starts.iter().rposition(|start| *start <= place);
            let mut pairs = 0;
            for query in 0..length {
                pairs += (0..=query).filter(|key| document(*key) == document(query)).count() as u64;
            }
            assert_eq!(causal_pairs(&starts, length), pairs);
        }
    }
}
