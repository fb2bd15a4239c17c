// Sends a small set of requests with OpenAI's JavaScript library and the Vercel AI SDK, and prints what came back as one
// JSON object. `node drive.mjs URL` takes the address of a server with the demo model; tests/e2e/test_openai_javascript.py checks
// what is printed.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  embedMany,
  experimental_transcribe as transcribe,
  generateObject,
  generateText,
  stepCountIs,
  streamText,
  tool,
} from "ai";
import { readFileSync } from "node:fs";
import OpenAI, { toFile } from "openai";
import { z } from "zod";

const model = "weft-demo";
const baseURL = `${process.argv[2]}/v1`;
const { image, question, imageUrl, sounds, hasEmbeddings } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const greeting = [{ role: "user", content: "Hello" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "weather", description: "Asks the weather.", parameters } };
const calling = {
  model,
  messages: [{ role: "user", content: "How is the weather in Rome?" }],
  tools: [weather],
  tool_choice: "required",
  parallel_tool_calls: false,
  max_tokens: 400,
  temperature: 0,
};

async function textOf(stream, piece) {
  let text = "";
  for await (const each of stream) text += piece(each) ?? "";
  return text;
}

async function thrown(work) {
  try {
    await work();
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}

async function chats() {
  const fields = { model, messages: greeting, temperature: 0 };
  const whole = await client.chat.completions.create(fields);
  const streamed = await client.chat.completions.create({ ...fields, stream: true });
  const helper = client.chat.completions.stream(fields);
  const content = [
    { type: "image_url", image_url: { url: image } },
    { type: "text", text: question },
  ];
  const seen = await client.chat.completions.create({ ...fields, messages: [{ role: "user", content }] });
  const named = [{ type: "image_url", image_url: { url: imageUrl } }, content[1]];
  const fetched = await client.chat.completions.create({ ...fields, messages: [{ role: "user", content: named }] });
  const held = [{ type: "file", file: { filename: "picture.png", file_data: image } }, content[1]];
  const file = await client.chat.completions.create({ ...fields, messages: [{ role: "user", content: held }] });
  return {
    whole: whole.choices[0].message.content,
    streamed: await textOf(streamed, (chunk) => chunk.choices[0]?.delta.content),
    helper: await helper.finalContent(),
    seen: seen.choices[0].message.content,
    fetched: fetched.choices[0].message.content,
    file: file.choices[0].message.content,
    usage: whole.usage,
  };
}

async function tools() {
  const whole = await client.chat.completions.create(calling);
  const helper = client.chat.completions.stream(calling);
  const joined = await helper.finalChatCompletion();
  const given = [];
  const runner = client.chat.completions.runTools({
    ...calling,
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          description: "Asks the weather.",
          parameters,
          parse: JSON.parse,
          function: (args) => {
            given.push(args);
            return "sunny";
          },
        },
      },
    ],
    tool_choice: { type: "function", function: { name: "weather" } },
  });
  await runner.done();
  return {
    whole: whole.choices[0].message.tool_calls.map((call) => call.function.arguments),
    streamed: joined.choices[0].message.tool_calls.map((call) => call.function.arguments),
    given,
    results: runner.messages.filter((message) => message.role === "tool").map((message) => message.content),
  };
}

/** Asks for a named tool with a stream, and puts the pieces of the call together as they come. */
async function namedTool() {
  const stream = await client.chat.completions.create({
    ...calling,
    tool_choice: { type: "function", function: { name: "weather" } },
    stream: true,
  });
  let name = "";
  let given = "";
  for await (const chunk of stream) {
    for (const call of chunk.choices[0]?.delta.tool_calls ?? []) {
      name += call.function.name ?? "";
      given += call.function.arguments ?? "";
    }
  }
  return { name, given };
}

async function responses() {
  const fields = {
    model,
    input: "How is the weather in Rome?",
    tools: [{ type: "function", strict: true, name: "weather", description: "Asks the weather.", parameters }],
    tool_choice: "required",
    parallel_tool_calls: false,
    max_output_tokens: 400,
    temperature: 0,
  };
  const whole = await client.responses.create(fields);
  const types = [];
  let given = "";
  let last = null;
  for await (const event of await client.responses.create({ ...fields, stream: true })) {
    if (types.at(-1) !== event.type) types.push(event.type);
    if (event.type === "response.function_call_arguments.delta") given += event.delta;
    last = event;
  }
  return { whole: whole.output[0].arguments, given, types, final: last.response.output[0].arguments };
}

async function transcripts() {
  const answers = {};
  for (const [word, data] of Object.entries(sounds)) {
    const file = () => toFile(Buffer.from(data, "base64"), "said.mp3");
    const fields = async () => ({ model, file: await file() });
    const whole = await client.audio.transcriptions.create(await fields());
    const text = await client.audio.transcriptions.create({ ...(await fields()), response_format: "text" });
    const stream = await client.audio.transcriptions.create({ ...(await fields()), stream: true });
    let deltas = "";
    let done = null;
    for await (const event of stream) {
      if (event.type === "transcript.text.delta") deltas += event.delta;
      if (event.type === "transcript.text.done") done = event;
    }
    answers[word] = { whole: whole.text, text, deltas, done: done.text, sameUsage: isSame(whole.usage, done.usage) };
  }
  return answers;
}

function isSame(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

async function others() {
  const completion = await client.completions.create({ model, prompt: ["The red", "A blue"], max_tokens: 4, echo: true });
  const response = await client.responses.create({ model, input: "Hello", temperature: 0 });
  const stream = client.responses.stream({ model, input: "Hello", temperature: 0 });
  const deltas = await textOf(stream, (event) => (event.type === "response.output_text.delta" ? event.delta : ""));
  const models = [];
  for await (const each of client.models.list()) models.push(each.id);
  return {
    completions: completion.choices.map((choice) => choice.text),
    response: response.output_text,
    responseDeltas: deltas,
    responseFinal: (await stream.finalResponse()).output_text,
    models,
  };
}

async function embeddingSizes() {
  if (!hasEmbeddings) return [];
  const embeddings = await client.embeddings.create({ model, input: ["A red circle", "A blue square"] });
  return embeddings.data.map((each) => each.embedding.length);
}

async function errors() {
  return {
    badRequest: await thrown(() => client.chat.completions.create({ model, messages: greeting, temperature: 9 })),
    badStream: await thrown(() =>
      client.chat.completions.create({ model, messages: greeting, temperature: 9, stream: true }),
    ),
    badSound: await thrown(async () =>
      client.audio.transcriptions.create({ model, file: await toFile(Buffer.from("no sound"), "said.mp3") }),
    ),
    unreachable: await thrown(() => {
      const content = [{ type: "image_url", image_url: { url: `${imageUrl}.gone` } }];
      return client.chat.completions.create({ model, messages: [{ role: "user", content }] });
    }),
    notFound: await thrown(() => client.chat.completions.create({ model: "other", messages: greeting })),
  };
}

const seenSchema = z.object({ shape: z.enum(["circle", "square"]), count: z.literal([1, 2, 3]) });

/** Asks the Vercel AI SDK for the sizes of two embeddings. */
async function vercelSizes(provider) {
  if (!hasEmbeddings) return [];
  const one = await embedMany({ model: provider.textEmbeddingModel(model), values: ["A red circle", "A blue square"] });
  return one.embeddings.map((each) => each.length);
}

/** Asks the Vercel AI SDK for a transcript. */
async function vercelTranscript(provider) {
  const [word, data] = Object.entries(sounds)[0];
  const heard = await transcribe({ model: provider.transcription(model), audio: Buffer.from(data, "base64") });
  return { word, heard: heard.text };
}

/** Asks one model of the Vercel AI SDK for a text, a stream, an object, and a call of a tool. */
async function vercel(each) {
  const text = await generateText({ model: each, prompt: "Hello", temperature: 0, maxRetries: 0 });
  const stream = streamText({ model: each, prompt: "Hello", temperature: 0, maxRetries: 0 });
  const streamed = await textOf(stream.textStream, (piece) => piece);
  const content = [
    { type: "image", image },
    { type: "text", text: question },
  ];
  const seen = await generateText({ model: each, messages: [{ role: "user", content }], temperature: 0, maxRetries: 0 });
  const object = await generateObject({ model: each, schema: seenSchema, prompt: "Hello", maxRetries: 0 });
  const given = [];
  const called = await generateText({
    model: each,
    prompt: "How is the weather in Rome?",
    tools: {
      weather: tool({
        description: "Asks the weather.",
        inputSchema: z.object({ city: z.string().max(12), days: z.int().min(1).max(9) }),
        execute: (args) => {
          given.push(args);
          return "sunny";
        },
      }),
    },
    toolChoice: "required",
    stopWhen: stepCountIs(1),
    maxOutputTokens: 400,
    maxRetries: 0,
  });
  return {
    text: text.text,
    usage: text.usage.outputTokens,
    streamed,
    seen: seen.text,
    object: object.object,
    given,
    results: called.toolResults.map((result) => result.output),
  };
}

const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "weft", baseURL, supportsStructuredOutputs: true });
const answers = {
  chats: await chats(),
  tools: await tools(),
  namedTool: await namedTool(),
  responses: await responses(),
  transcripts: await transcripts(),
  others: await others(),
  embeddingSizes: await embeddingSizes(),
  errors: await errors(),
  vercelResponses: await vercel(openai(model)),
  vercelChat: await vercel(openai.chat(model)),
  vercelTranscript: await vercelTranscript(openai),
  vercelSizes: await vercelSizes(openai),
  vercelCompatible: await vercel(compatible(model)),
};
console.log(JSON.stringify(answers));
