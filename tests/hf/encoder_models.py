"""Encoder and encoder-decoder model families for text."""

from __future__ import annotations

import torch
from family import BATCH, LENGTH, Family, pair, plain_text, text, tokens, unmasked
from tiny_configs import VOCABULARY

ENCODERS = {
    "bert": Family("BertForMaskedLM"),
    "roberta": Family("RobertaForMaskedLM"),
    "xlm_roberta": Family("XLMRobertaForMaskedLM"),
    "deberta": Family("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta_v2": Family(
        "DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}
    ),
    "albert": Family("AlbertForMaskedLM", {"embedding_size": 10}),
    "electra": Family("ElectraForMaskedLM", {"embedding_size": 10}),
    "distilbert": Family("DistilBertForMaskedLM"),
    "xlnet": Family("XLNetLMHeadModel"),
    "longformer": Family("LongformerForMaskedLM", {"attention_window": 4}),
    "modernbert": Family("ModernBertForMaskedLM"),
    "mpnet": Family("MPNetForMaskedLM", {"relative_attention_num_buckets": 32}),
    "fnet": Family("FNetForMaskedLM", {}, unmasked),
    "funnel": Family("FunnelForMaskedLM", {"block_sizes": [1, 1]}, lambda: text(8)),
    "roformer": Family("RoFormerForMaskedLM", {"embedding_size": 24}),
    "squeezebert": Family(
        "SqueezeBertForMaskedLM",
        {
            "embedding_size": 24,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 1,
            "intermediate_groups": 1,
            "output_groups": 1,
        },
    ),
    "camembert": Family("CamembertForMaskedLM"),
    "convbert": Family("ConvBertForMaskedLM", {"embedding_size": 24, "head_ratio": 2}),
    "mobilebert": Family("MobileBertForMaskedLM", {"embedding_size": 8, "intra_bottleneck_size": 12, "true_hidden_size": 12}),
    "layoutlm": Family("LayoutLMForMaskedLM"),
    "megatron_bert": Family("MegatronBertForMaskedLM"),
    "nystromformer": Family("NystromformerForMaskedLM", {"num_landmarks": 8, "segment_means_seq_len": 8}, lambda: text(8)),
    "rembert": Family("RemBertForMaskedLM", {"input_embedding_size": 10, "output_embedding_size": 10}),
    "xlm": Family("XLMWithLMHeadModel", {"emb_dim": 24}),
    "flaubert": Family("FlaubertWithLMHeadModel", {"emb_dim": 24}),
    "ibert": Family("IBertForMaskedLM"),
    "big_bird": Family("BigBirdForMaskedLM", {"block_size": 2, "num_random_blocks": 1}, lambda: text(16)),
    "canine": Family(
        "CanineForTokenClassification",
        {"num_hash_buckets": 16, "local_transformer_stride": 4, "downsampling_rate": 4},
        lambda: {"input_ids": tokens(8), "labels": tokens(8) % 2},
    ),
    "esm": Family("EsmForMaskedLM", {"mask_token_id": 4}),
    "reformer": Family(
        "ReformerForMaskedLM",
        {
            "is_decoder": False,
            "attn_layers": ["local", "lsh"],
            "axial_pos_embds": False,
            "num_buckets": 2,
            "attention_head_size": 6,
            "feed_forward_size": 29,
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "hash_seed": 0,
            "hidden_dropout_prob": 0.0,
            "local_attention_probs_dropout_prob": 0.0,
            "lsh_attention_probs_dropout_prob": 0.0,
            "hidden_size": 24,
        },
        lambda: text(8),
    ),
    "eurobert": Family("EuroBertForMaskedLM"),
    "luke": Family("LukeForMaskedLM", {"entity_vocab_size": 11, "entity_emb_size": 6}),
    "splinter": Family(
        "SplinterForQuestionAnswering",
        {"question_token_id": 4},
        lambda: {"input_ids": tokens(), "start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([3, 2, 4])},
    ),
    "perceiver": Family(
        "PerceiverForMaskedLM",
        {
            "num_latents": 5,
            "d_latents": 24,
            "d_model": 24,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "qk_channels": 16,
            "v_channels": 24,
        },
        lambda: {"inputs": tokens(40), "labels": tokens(40)},
    ),
    "bert classifier": Family(
        "BertForSequenceClassification", {"num_labels": 3}, lambda: {**plain_text(), "labels": torch.tensor([2, 0, 1])}
    ),
    "bert answers": Family(
        "BertForQuestionAnswering",
        {},
        lambda: {**plain_text(), "start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([3, 2, 4])},
    ),
    "bert choices": Family(
        "BertForMultipleChoice",
        {},
        lambda: {"input_ids": tokens(LENGTH * 2).view(BATCH, 2, LENGTH), "labels": torch.tensor([1, 0, 1])},
    ),
}

SEQUENCE_TO_SEQUENCE = {
    "t5": Family("T5ForConditionalGeneration", {"decoder_start_token_id": 2}, pair),
    "mt5": Family("MT5ForConditionalGeneration", {}, pair),
    "umt5": Family("UMT5ForConditionalGeneration", {}, pair),
    "longt5": Family("LongT5ForConditionalGeneration", {"decoder_start_token_id": 2, "local_radius": 3}, pair),
    "longt5 global": Family(
        "LongT5ForConditionalGeneration",
        {"decoder_start_token_id": 2, "local_radius": 3, "encoder_attention_type": "transient-global", "global_block_size": 4},
        pair,
    ),
    "bart": Family("BartForConditionalGeneration", {}, pair),
    "mbart": Family("MBartForConditionalGeneration", {}, pair),
    "pegasus": Family("PegasusForConditionalGeneration", {}, pair),
    "pegasus_x": Family("PegasusXForConditionalGeneration", {"block_size": 4, "num_global_tokens": 2}, pair),
    "marian": Family("MarianMTModel", {"decoder_vocab_size": VOCABULARY}, pair),
    "m2m_100": Family("M2M100ForConditionalGeneration", {}, pair),
    "led": Family(
        "LEDForConditionalGeneration",
        {"attention_window": 4, "max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 40},
        pair,
    ),
    "blenderbot": Family("BlenderbotForConditionalGeneration", {}, pair),
    "blenderbot_small": Family("BlenderbotSmallForConditionalGeneration", {}, pair),
    "plbart": Family("PLBartForConditionalGeneration", {}, pair),
    "prophetnet": Family(
        "ProphetNetForConditionalGeneration",
        {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "ngram": 2, "num_buckets": 8},
        pair,
        single=True,
    ),
    "bigbird_pegasus": Family("BigBirdPegasusForConditionalGeneration", {"attention_type": "original_full"}, pair),
    "fsmt": Family(
        "FSMTForConditionalGeneration",
        {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]},
        lambda: {**pair(5)},
        single=True,
    ),
    "mvp": Family("MvpForConditionalGeneration", {}, pair),
}
