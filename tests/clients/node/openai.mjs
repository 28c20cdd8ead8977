// What the `openai` package for Node makes of a server, as JSON for the test that runs it:
//     node openai.mjs BASE_URL GUARDED_BASE_URL KEY
import OpenAI from "openai";

const [baseURL, guardedURL, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none is needed", maxRetries: 0 });
const guarded = new OpenAI({ baseURL: guardedURL, apiKey: key, maxRetries: 0 });

const messages = [{ role: "user", content: "Once upon a time" }];
const asked = { model: "mini", messages, max_tokens: 24, seed: 11 };
const endless = { model: "mini", messages, n: 64, ignore_eos: true, stream: true };

async function refusal(request) {
  try {
    await request;
  } catch (error) {
    const { status, code, param, type, requestID } = error;
    return { name: error.constructor.name, status, code, param, type, hasId: Boolean(requestID) };
  }
  return null;
}

async function read(stream) {
  const texts = {};
  const ends = {};
  let usage = null;
  for await (const chunk of stream) {
    usage = chunk.usage ?? usage;
    for (const { index, delta, finish_reason } of chunk.choices) {
      texts[index] = (texts[index] ?? "") + (delta.content ?? "");
      if (finish_reason !== null) ends[index] = [...(ends[index] ?? []), finish_reason];
    }
  }
  return { texts, ends, usage };
}

// A stream that is left in the middle, by `abort` or by leaving the loop.
async function leave() {
  for await (const chunk of await client.chat.completions.create(endless)) {
    if (chunk.choices.length) break;
  }
  const controller = new AbortController();
  const stream = await client.chat.completions.create(endless, { signal: controller.signal });
  let chunks = 0;
  for await (const chunk of stream) {
    chunks += chunk.choices.length > 0;
    if (chunks === 3) controller.abort();
  }
  return chunks;
}

async function failInTheMiddle() {
  const stream = await guarded.chat.completions.create(endless);
  return refusal(read(stream));
}

// The helper takes an answer that ended with `length` for a failure, so these end with a full stop.
async function helper() {
  const sentence = { model: "mini", messages, seed: 11, stop: ".", logprobs: true };
  const plain = await client.chat.completions.create(sentence);
  const helped = await client.chat.completions.stream(sentence).finalChatCompletion();
  return [plain, helped].map(({ choices: [{ message, finish_reason, logprobs }] }) => {
    return { content: message.content, finish_reason, logprobs };
  });
}

const models = [];
for await (const model of client.models.list()) models.push(model.id);

const plain = await client.chat.completions.create(asked);
const logprobs = await client.completions.create({
  model: "mini",
  prompt: ["Once", "The sea"],
  max_tokens: 4,
  logprobs: 2,
  temperature: 0,
});

const report = {
  models,
  plain: { ...plain, requestId: plain._request_id },
  streamed: await read(
    await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    }),
  ),
  choices: await read(await client.chat.completions.create({ ...asked, n: 3, stream: true })),
  completions: logprobs.choices,
  helper: await helper(),
  refusals: {
    value: await refusal(client.completions.create({ model: "mini", prompt: "x", top_p: 7 })),
    model: await refusal(client.chat.completions.create({ ...asked, model: "gpt-4o" })),
    key: await refusal(new OpenAI({ baseURL: guardedURL, apiKey: "guessed" }).models.list()),
    timeout: await refusal(
      client.chat.completions.create({ ...endless, stream: false }, { timeout: 300 }),
    ),
    stream: await failInTheMiddle(),
  },
  chunksBeforeAbort: await leave(),
};
console.log(JSON.stringify(report));
