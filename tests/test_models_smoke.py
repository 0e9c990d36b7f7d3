import torch
from foredraft.core.law import SamplingLaw, GREEDY
from foredraft.core.protocols import Answer, Drafter, Target
from foredraft.models.loading import load_causal_lm
from foredraft.models.target import LocalTarget
from foredraft.models.causal_lm import load_causal_lm_drafter, CausalLMDrafter
from foredraft.models.draft import Draft, save_draft, load_draft
from foredraft.checkpoint import DraftManifest


def test_smoke(tiny_target_folder, tiny_draft_folder, tmp_path):
    loaded = load_causal_lm(str(tiny_target_folder))
    target = LocalTarget(loaded)
    assert isinstance(target, Target)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 259, (n,), generator=g) for n in (5, 17, 9)]
    for law in (GREEDY, SamplingLaw(), SamplingLaw(0.7, 20, 0.9)):
        out = target.write(prompts, law, 20, 8, [1, 2, 3], lambda n: None)
        for p, o, seed in zip(prompts, out, (1, 2, 3)):
            (alone,) = target.write([p], law, 20, 8, [seed], lambda n: None)
            assert alone.token_ids.tolist() == o.token_ids.tolist()
            torch.testing.assert_close(alone.logprobs, o.logprobs)
    out = target.write(prompts, GREEDY, 20, 8, [1, 2, 3], lambda n: None)
    for p, o in zip(prompts, out):
        ref = loaded.model.generate(p[None], max_new_tokens=20, do_sample=False, suppress_tokens=list(range(259, 272)))
        assert ref[0, len(p) :].tolist() == o.token_ids.tolist()
    drafter = load_causal_lm_drafter(tiny_draft_folder)
    assert isinstance(drafter, Drafter)
    for law in (GREEDY, SamplingLaw(), SamplingLaw(0.7, 20, 0.9)):
        d = drafter.bind(law)
        answers = [Answer(torch.cat([p, o.token_ids]), len(p)) for p, o in zip(prompts, out)]
        for a, e in zip(answers, d.replay(answers, 4)):
            for i in range(a.num_tokens):
                prop = d.propose(a.token_ids[: a.start + i], 3, g)
                x = int(a.token_ids[a.start + i])
                torch.testing.assert_close(prop.laws.probs(0, int(prop.token_ids[0]))[x], e.probs[i])
    draft = Draft(drafter.draft.model, torch.arange(0, 200))
    m = save_draft(draft, tmp_path / "d", DraftManifest("causal-lm", 272, "t", "f", "g"), loaded.tokenizer)
    back = load_causal_lm_drafter(tmp_path / "d")
    assert back.num_parameters < drafter.num_parameters
    print(m, back.propose(prompts[0], 4, g))
