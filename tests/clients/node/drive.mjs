// Sends a small set of requests with OpenAI's JavaScript library and the Vercel AI SDK, and prints what came back as one
// JSON object. `node drive.mjs URL` takes the address of a server with the demo model; tests/e2e/test_openai_javascript.py checks
// what is printed.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { z } from "zod";

const model = "weft-demo";
const baseURL = `${process.argv[2]}/v1`;
const { image, question } = JSON.parse(readFileSync(0, "utf8"));
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
  return {
    whole: whole.choices[0].message.content,
    streamed: await textOf(streamed, (chunk) => chunk.choices[0]?.delta.content),
    helper: await helper.finalContent(),
    seen: seen.choices[0].message.content,
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

async function others() {
  const completion = await client.completions.create({ model, prompt: ["The red", "A blue"], max_tokens: 4, echo: true });
  const response = await client.responses.create({ model, input: "Hello", temperature: 0 });
  const stream = client.responses.stream({ model, input: "Hello", temperature: 0 });
  const deltas = await textOf(stream, (event) => (event.type === "response.output_text.delta" ? event.delta : ""));
  const embeddings = await client.embeddings.create({ model, input: ["A red circle", "A blue square"] });
  const models = [];
  for await (const each of client.models.list()) models.push(each.id);
  return {
    completions: completion.choices.map((choice) => choice.text),
    response: response.output_text,
    responseDeltas: deltas,
    responseFinal: (await stream.finalResponse()).output_text,
    embeddingSizes: embeddings.data.map((each) => each.embedding.length),
    models,
  };
}

async function errors() {
  return {
    badRequest: await thrown(() => client.chat.completions.create({ model, messages: greeting, temperature: 9 })),
    badStream: await thrown(() =>
      client.chat.completions.create({ model, messages: greeting, temperature: 9, stream: true }),
    ),
    notFound: await thrown(() => client.chat.completions.create({ model: "other", messages: greeting })),
  };
}

const seenSchema = z.object({ shape: z.enum(["circle", "square"]), count: z.literal([1, 2, 3]) });

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
  others: await others(),
  errors: await errors(),
  vercelResponses: await vercel(openai(model)),
  vercelChat: await vercel(openai.chat(model)),
  vercelCompatible: await vercel(compatible(model)),
};
console.log(JSON.stringify(answers));
