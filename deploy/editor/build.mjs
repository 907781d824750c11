// Bundles what entry.js names into one ES module for the web page, with the licences of all that is in it. The folder's
// name has the bundle's hash, because browsers keep what is below vendor/ for ever; static/newjob/vendor.js names it.

import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const STATIC = "../../service/web/static";
const NOT_PACKAGED = { "@cfworker/json-schema": "json-schema.LICENSE" }; // from its repository

const made = await build({
  entryPoints: ["entry.js"],
  bundle: true,
  format: "esm",
  minify: true,
  target: "es2022",
  legalComments: "none", // LICENSES.txt has them whole
  metafile: true,
  write: false,
});
const code = made.outputFiles[0].contents;
const folder = `editor-${createHash("sha256").update(code).digest("hex").slice(0, 12)}`;

const [output] = Object.values(made.metafile.outputs);
const packages = new Set(
  Object.entries(output.inputs)
    .filter(([, { bytesInOutput }]) => bytesInOutput)
    .map(([file]) => /^node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(file)?.[1])
    .filter(Boolean),
);
const licences = [...packages].sort().map((name) => {
  const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  const file = readdirSync(`node_modules/${name}`).find((each) => /^licen[cs]e/i.test(each));
  const text = readFileSync(file ? `node_modules/${name}/${file}` : NOT_PACKAGED[name], "utf8");
  return `${name} ${version} (${license})\n\n${text.trim()}\n`;
});

for (const old of readdirSync(`${STATIC}/vendor`).filter((each) => each.startsWith("editor-")))
  rmSync(`${STATIC}/vendor/${old}`, { recursive: true });
mkdirSync(`${STATIC}/vendor/${folder}`);
writeFileSync(`${STATIC}/vendor/${folder}/editor.js`, code);
writeFileSync(`${STATIC}/vendor/${folder}/LICENSES.txt`, licences.join(`\n${"-".repeat(80)}\n\n`));
writeFileSync(
  `${STATIC}/newjob/vendor.js`,
  `// Written by deploy/editor/build.mjs: where the bundle of other people's packages is.\n\nexport * from "../vendor/${folder}/editor.js";\n`,
);
console.log(`${folder}: ${code.length} bytes, ${packages.size} packages`);
