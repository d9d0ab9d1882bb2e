//! `xavier`, `smallinit` and `fairseq`.

use super::{embedding, xavier_normal, xavier_uniform, Init, Role};

pub static XAVIER: Init = Init {
    name: "xavier",
    definition: "every linear Xavier normal, std √(2/(fan_in + fan_out)), q, k and v each for itself",
    source: "Glorot & Bengio 2010",
    linear: |_, fan_in, fan_out, _| xavier_normal(1.0, fan_in, fan_out),
    output: |d, v| xavier_normal(1.0, d, v),
};

pub static SMALL: Init = Init {
    name: "smallinit",
    definition: "attention q, k, v, out: std √(2/(5d)); feed-forward √(2/(d + d_ff))",
    source: "Nguyen & Salazar 2019, §2.2",
    linear: |role, fan_in, fan_out, place| match role {
        Role::FeedForward1 | Role::FeedForward2 => xavier_normal(1.0, fan_in, fan_out),
        _ => xavier_normal(1.0, place.d_model, 4 * place.d_model),
    },
    output: |d, v| xavier_normal(1.0, d, v),
};

pub static FAIRSEQ: Init = Init {
    name: "fairseq",
    definition: "Xavier uniform; q, k, v gain 1/√2; an untied output N(0, 1/d)",
    source: "fairseq; Nguyen & Salazar 2019, App C",
    linear: |role, fan_in, fan_out, _| match role {
        Role::Query | Role::Key | Role::Value => xavier_uniform(0.5f64.sqrt(), fan_in, fan_out),
        _ => xavier_uniform(1.0, fan_in, fan_out),
    },
    output: |d, _| embedding(d),
};
