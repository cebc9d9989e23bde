// A form that starts a job, from a configuration in TOML or JSON, typed or from a file.
import { h } from "../dom.js";
import { json } from "../format.js";
import { Refused } from "../api.js";
import { href } from "../curves.js";
import { ask, post } from "./state.js";

const MOST_BYTES = 2 ** 22;

function field(label, input, hint = null) {
  input.id = `start-${input.name}`;
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input, hint === null ? null : h("small", { class: "muted" }, hint));
}

const number = (name, value, step) => h("input", { type: "number", name, value, min: 0, step, required: true });

// Names a submission, so that the same one that is sent twice is one job.
function drawKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export async function startView({ query }) {
  const view = (...children) => ({ title: "Start a job", crumbs: [["start a job", "#/start"]], node: h("div", { class: "view service" }, h("div", { class: "head" }, h("h1", {}, "Start a job")), children) });
  const like = query.get("like") === null ? null : await ask(`/jobs/${encodeURIComponent(query.get("like"))}`);
  const config = h("textarea", { name: "config", rows: 16, spellcheck: "false", class: "code" });
  if (like !== null) config.value = json(like.config, 2);
  const file = h("input", { type: "file", name: "file", accept: ".toml,.json,application/json" });
  const name = h("input", { name: "name", maxlength: 200, value: like?.name ?? "", autocomplete: "off" });
  const from = h("input", { name: "from", autocomplete: "off", spellcheck: "false", value: like?.from_job ?? query.get("from") ?? "" });
  const needs = like?.resources ?? { cpus: 1, gpus: 0, memory_gib: 0 };
  const cpus = number("cpus", needs.cpus, "any"), gpus = number("gpus", needs.gpus, "any"), memory = number("memory", needs.memory_gib, "any");
  const priority = h("select", { name: "priority" }, ["low", "normal", "high"].map((one) => h("option", { value: one, selected: one === (like?.priority ?? "normal") }, one)));
  const limit = h("input", { type: "number", name: "limit", min: 0, step: "any", value: like?.time_limit_seconds ? like.time_limit_seconds / 60 : "" });
  const problem = h("p", { class: "problem", role: "alert" });
  const start = h("button", { class: "primary" }, "Start");
  let key = drawKey();

  file.addEventListener("change", async () => {
    const chosen = file.files[0];
    if (chosen === undefined) return;
    if (chosen.size > MOST_BYTES) { problem.textContent = `${chosen.name} has ${chosen.size} bytes; a request has at most ${MOST_BYTES}.`; return; }
    config.value = await chosen.text();
    problem.textContent = "";
  });

  function body() {
    const text = config.value.trim();
    const asked = { priority: priority.value, resources: { cpus: Number(cpus.value), gpus: Number(gpus.value), memory_gib: Number(memory.value) } };
    if (name.value.trim() !== "") asked.name = name.value.trim();
    if (from.value.trim() !== "") asked.from_job = from.value.trim();
    if (limit.value !== "" && Number(limit.value) > 0) asked.time_limit_seconds = Number(limit.value) * 60;
    if (text.startsWith("{")) {
      try { asked.config = JSON.parse(text); } catch (error) { throw new Refused(400, `The configuration is not valid JSON: ${error.message}`); }
    } else if (text !== "") asked.config_toml = config.value;
    return asked;
  }

  const form = h("form", { class: "start", onsubmit: async (event) => {
    event.preventDefault();
    problem.textContent = "";
    start.disabled = true;
    try {
      const job = await post("/jobs", body(), { "idempotency-key": key });
      location.hash = href(job.job_id, "job");
    } catch (error) {
      problem.textContent = error.message;
      if (error.status !== 0) key = drawKey();   // else the server may have taken it, and a second attempt is the same job
      problem.scrollIntoView({ block: "nearest" });
    }
    start.disabled = false;
  } },
    field("Configuration, in TOML or JSON", config, "As palestra run takes it. Tasks in files are of your machine: submit those with palestra submit."),
    field("Or a file", file),
    h("div", { class: "row" }, field("Name", name, "Empty: that of the configuration."), field("Weights of the job", from, "Empty: those of the model. With a job and no configuration, it is served.")),
    h("div", { class: "row" }, field("CPUs", cpus), field("GPUs", gpus), field("Memory, GiB", memory, "0: a share of the machine."), field("Priority", priority), field("Time limit, minutes", limit, "Empty: any time.")),
    problem, h("p", { class: "buttons" }, start));
  form.addEventListener("input", () => { key = drawKey(); });
  return view(form);
}
