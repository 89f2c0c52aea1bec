"""Write trtspec/data/training_prompts.jsonl: prompts on which draft heads are trained.

The target answers them itself (self-distillation), so only questions are needed, of as many kinds as the
heads will meet: chat, code, summaries, translation, rewriting, in English and some Chinese. They are made from
the lists below; the seed makes them reproducible. None is a prompt that heads are measured on.

    python scripts/training_prompts.py [--check]
"""

# ruff: noqa: E501
from __future__ import annotations

import json
import random
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "trtspec" / "data"
NUM_PROMPTS = 2400

TOPICS = """tides|vaccines|the water cycle|black holes|inflation|photosynthesis|earthquakes|rainbows|the French
Revolution|sleep|magnets|batteries|glaciers|bees|chess openings|jazz|compound interest|volcanoes|the printing
press|coral reefs|antibiotics|the Silk Road|electric cars|yeast|migration of birds|the immune system|sourdough|the
moon's phases|solar panels|wind turbines|the stock market|plate tectonics|memory|muscle growth|the Roman Empire|tea
ceremonies|deserts|rainforests|satellites|the internet|libraries|elections|recycling|composting|bridges|skyscrapers|
locks on canals|lighthouses|clocks|calendars|maps|compasses|telescopes|microscopes|X-rays|lasers|radio|submarines|
airplanes|bicycles|trains|steel|glass|paper|cotton|silk|coffee|chocolate|salt|sugar|honey|cheese|olive oil|spices|
vitamins|allergies|fevers|headaches|stress|habits|procrastination|negotiation|friendship|grief|gratitude|curiosity|
humour|honesty|leadership|teamwork|remote work|public speaking|job interviews|budgets|mortgages|insurance|taxes|
pensions|renting a flat|buying a used car|learning to swim|running a marathon|yoga|hiking|camping|gardening|
houseplants|dogs|cats|horses|owls|whales|spiders|snakes|frogs|butterflies|mushrooms|oak trees|roses|the violin|the
guitar|painting|photography|poetry|novels|theatre|film editing|animation|board games|crossword puzzles|knitting|
pottery|carpentry|plumbing|soldering|bread baking|soup|salads|breakfast|school lunches|picnics|birthdays|weddings|
moving house|neighbours|noise|traffic|cycling lanes|public parks|museums|airports|hotels|passports|jet lag|
mountains|rivers|lakes|islands|oceans|snow|fog|thunderstorms|hurricanes|droughts|seasons|climate""".replace(
    "\n", " "
)

CHAT = [
    "Explain {t} to a ten-year-old.", "What should everyone know about {t}?", "How does one get started with {t}?",
    "Give me five surprising facts about {t}.", "What are the most common misunderstandings about {t}?",
    "Write a short story in which {t} play an important part.", "Why do people care about {t}?",
    "List the advantages and disadvantages of {t}.", "Write a poem of eight lines about {t}.",
    "My friend says that {t} are overrated. What could I answer?", "What is the history of {t}, in brief?",
    "Prepare a ten-minute talk on {t}: give me an outline.", "What are three good questions to ask an expert on {t}?",
    "Describe {t} without using technical terms.", "How have {t} changed in the last hundred years?",
    "Write a polite email to a colleague who wants to learn about {t}.", "Compare {t} with {u}.",
    "Suggest a weekend activity for a family that is interested in {t}.", "What would happen if there were no {t}?",
    "Write a dialogue between a teacher and a student about {t}.", "Make a checklist for someone new to {t}.",
    "What is the connection between {t} and {u}?", "Summarize the main ideas behind {t} in one paragraph.",
    "Write the first paragraph of a newspaper article on {t}.", "Which books or subjects lead deeper into {t}?",
    "What mistakes do beginners make with {t}?", "Tell me something about {t} that I can repeat at dinner.",
    "Give step-by-step advice: {t}.", "Is it true that {t} matter more than {u}? Explain your reasoning.",
    "Write a friendly reply to a child who asks about {t}.", "Create a quiz of five questions about {t}, with answers.",
    "What does a typical day look like for someone who works with {t}?", "Write a slogan and a short text about {t}.",
]  # fmt: skip

PEOPLE = ["my landlord", "my manager", "a new customer", "my sister", "the school", "a hotel", "our supplier",
          "a former teacher", "the library", "a neighbour", "the editor", "my team", "an old friend", "the bank"]  # fmt: skip
MATTERS = ["a late delivery", "a broken heater", "a missed appointment", "a change of plans", "an invoice with a mistake",
           "a day off next Friday", "a lost key", "a refund", "a recommendation", "a noisy party", "the meeting on Monday",
           "a parking space", "an invitation to dinner", "a delayed project", "a thank-you for help"]  # fmt: skip
LETTERS = ["Write a short message to {p} about {m}.", "Draft a polite email to {p} concerning {m}.",
           "How should I tell {p} about {m}? Give me two versions.", "Write a formal letter to {p} about {m}."]  # fmt: skip

SUMS = [
    "A train travels {a} km in {b} hours. What is its average speed? Show the steps.",
    "A recipe for {b} people needs {a} g of flour. How much is needed for {c} people?",
    "What is {a} percent of {c}? Explain how to calculate it in your head.",
    "I bought {b} notebooks at {a} cents each and paid with {c} euros. How much change do I get?",
    "A rectangle is {a} m long and {b} m wide. Find its area and its perimeter.",
    "Convert {a} minutes into hours and minutes, and explain the method.",
    "In how many ways can {b} people stand in a line? Explain.",
    "Is {a} a prime number? Explain how you know.",
]

LANGUAGES = ["Python", "JavaScript", "C", "Java", "Go", "Rust", "TypeScript", "Python", "Python", "Python"]
TASKS = """reverses the words of a sentence|checks whether a string is a palindrome|returns the n-th Fibonacci number|
counts the vowels of a text|merges two sorted lists|removes duplicates from a list and keeps the order|finds the
longest word of a text|computes the greatest common divisor of two numbers|checks whether a number is prime|sorts a
list of dictionaries by a key|flattens a nested list|reads a CSV file and sums one column|counts how often each word
occurs in a file|converts Celsius to Fahrenheit|validates an email address|generates a random password|finds the
intersection of two lists|rotates a list by k places|computes the factorial of a number|transposes a matrix|multiplies
two matrices|implements binary search|implements bubble sort|implements merge sort|implements quicksort|finds the median
of a list|computes the moving average of a list|groups words by their first letter|parses a date such as 2024-05-01|
formats a number with thousands separators|splits a list into chunks of size n|checks whether two words are anagrams|
finds all pairs with a given sum|computes the power set of a set|converts a Roman numeral to an integer|converts an
integer to binary|retries a function three times on failure|caches the results of a slow function|measures how long a
function takes|walks a directory and lists the files by size|reads JSON from a file and prints one field|downloads a
page and prints its title|computes the distance between two points|finds the first missing positive integer|validates a
credit card number with the Luhn algorithm|evaluates a simple arithmetic expression|prints a multiplication table|
simulates a coin toss n times|draws a pyramid of stars|compresses a string with run-length encoding|finds the most
common element of a list|checks whether a list is sorted|zips two lists into a dictionary|capitalizes every word|counts
lines, words and characters of a file|finds the shortest path in a grid|detects a cycle in a linked list|reverses a
linked list|inserts a node into a binary search tree|traverses a tree in order|computes the depth of a tree|checks
whether a year is a leap year|computes compound interest|rolls two dice until both show six""".replace(
    "\n", " "
)
CODE = [
    "Write a {l} function that {k}.", "Write a function in {l} that {k}. Add comments.",
    "Show me how to write {l} code that {k}, with an example of its use.",
    "I need a small {l} program that {k}. Keep it simple.", "Write a {l} function that {k}, and explain how it works.",
    "How would you test a {l} function that {k}? Write the tests.",
    "Write a {l} function that {k}. What is its time complexity?",
]  # fmt: skip
CLASSES = ["a bank account", "a queue", "a shopping cart", "a thermostat", "a library of books", "a playing card deck",
           "a matrix", "a timer", "a priority queue", "a student with grades", "a parking lot", "a graph",
           "a fraction", "an inventory", "a chat room", "a vending machine", "a calendar", "a binary tree",
           "a ring buffer", "a rate limiter", "a point in the plane", "an address book", "a to-do list"]  # fmt: skip
CLASS_TASKS = ["Write a {l} class for {c}.", "Design a {l} class that represents {c}, with three methods and an example.",
               "Write {c} as a class in {l} and add unit tests.", "Refactor: what would a clean {l} class for {c} look like?"]  # fmt: skip
CONCEPTS = ["list comprehensions", "closures", "decorators", "generators", "recursion", "pointers", "references", "hash tables",
            "linked lists", "inheritance", "interfaces", "exceptions", "context managers", "threads", "async and await",
            "promises", "callbacks", "garbage collection", "unit tests", "mocking", "type hints", "regular expressions",
            "SQL joins", "indexes in a database", "transactions", "REST", "HTTP status codes", "Docker containers", "git branches",
            "merge conflicts", "environment variables", "virtual environments", "lambda functions", "immutable objects",
            "binary search", "big-O notation", "stacks and queues", "dictionaries", "sets", "slicing", "string formatting",
            "scope of variables", "the difference between == and is", "integer overflow", "floating-point rounding"]  # fmt: skip
CONCEPT_TASKS = ["Explain {c} with a short example.", "What are {c}, and when should I use them?",
                 "I do not understand {c}. Show me a simple program that uses them.", "What are common mistakes with {c}?",
                 "Write three exercises on {c}, with solutions."]  # fmt: skip
TABLES = ["books(id, title, author, year)", "employees(id, name, department, salary)", "orders(id, customer, total, placed_on)",
          "students(id, name, grade)", "flights(id, origin, destination, departs)", "products(id, name, price, stock)",
          "visits(id, page, user, seen_at)", "songs(id, title, artist, seconds)"]  # fmt: skip
QUERIES = ["the five largest values", "the number of rows per group", "all rows of the last year", "the average per group",
           "duplicates", "rows that occur only once", "the first row of each group", "a running total"]  # fmt: skip
SHELL = ["lists all files larger than 100 MB", "counts the lines of all Python files", "renames all .txt files to .md",
         "finds files changed in the last day", "replaces a word in all files of a folder", "shows which process uses port 8080",
         "prints the third column of a file", "removes empty folders", "sorts a file by its second column", "archives a folder",
         "shows the free space of all disks", "finds broken symbolic links", "watches a log file for errors"]  # fmt: skip
PATTERNS = ["phone numbers", "dates such as 31.12.2024", "hexadecimal colours", "IPv4 addresses", "URLs", "postal codes",
            "words in capitals", "numbers with two decimals", "HTML tags", "repeated words", "file names ending in .csv"]  # fmt: skip

BROKEN = [
    "def average(values):\n    total = 0\n    for v in values:\n        total += v\n    return total / len(value)",
    "def is_even(n):\n    return n % 2 == 1",
    "for i in range(1, 10):\n    if i % 3 = 0:\n        print(i)",
    "def greet(name, greetings=[]):\n    greetings.append('Hello ' + name)\n    return greetings",
    "def last(items):\n    return items[len(items)]",
    "numbers = [3, 1, 2]\nsorted_numbers = numbers.sort()\nprint(sorted_numbers)",
    "def factorial(n):\n    return n * factorial(n - 1)",
    "with open('data.txt') as f:\n    pass\nprint(f.read())",
    "total = 0\nwhile total < 10:\n    print(total)",
    "def find(items, x):\n    for item in items:\n        if item == x:\n            return True\n        else:\n            return False",
    "let sum = 0;\nfor (let i = 0; i <= items.length; i++) {\n  sum += items[i];\n}",
    "const user = fetch('/user');\nconsole.log(user.name);",
    "int *make(void) {\n    int x = 5;\n    return &x;\n}",
    'char name[4];\nstrcpy(name, "Alice");',
    "def count(text):\n    counts = {}\n    for c in text:\n        counts[c] += 1\n    return counts",
    "import random\ndef roll():\n    return random.randint(0, 6)",
]
BROKEN_TASKS = ["What is wrong with this code?\n\n```\n{b}\n```", "Find the bug and give the corrected version:\n\n```\n{b}\n```",
                "Explain line by line what this code does:\n\n```\n{b}\n```", "Add comments and a docstring to this code:\n\n```\n{b}\n```",
                "Rewrite this code so that it is easier to read:\n\n```\n{b}\n```", "Write tests for this code:\n\n```\n{b}\n```"]  # fmt: skip

SENTENCES = """The committee met on Tuesday to discuss the new playground, but half of its members were stuck in the snow.|
Our bakery opens at six, and by seven the rye bread is usually gone.|The river had risen overnight, so the ferry stayed
on the other bank until noon.|She sold the old bicycle to a student who promised to repair the bell.|After three failed
attempts the engineers replaced the sensor and the satellite answered at once.|The museum keeps two thousand letters,
most of which nobody has read for a century.|Because the harvest was late, the market had apples but no pears.|The town
will close the bridge for two weeks in May to renew the railings.|A small team measured the glacier every spring and found
that it had lost four metres.|He learned to cook from his grandmother, who never wrote a recipe down.|The company moved its
office to a former school and kept the blackboards.|When the power failed, the orchestra went on playing by candlelight.|
The patient felt better after a week and returned to work on Monday.|Two hikers reported smoke, and the fire brigade put out
the fire within an hour.|The new timetable has fewer trains in the evening, which annoyed many commuters.|Volunteers planted
six hundred trees along the motorway last autumn.""".replace("\n", " ")
REWRITES = ["Translate into French: {s}", "Translate into Spanish: {s}", "Translate into German: {s}", "Translate into Chinese: {s}",
            "Rewrite in a formal style: {s}", "Say the same in simpler words: {s}", "Summarize in five words: {s}",
            "Continue this text: {s}", "Turn this into a headline and a short article: {s}", "Ask three questions about this text: {s}",
            "Correct the grammar if needed, and explain: {s}", "Write a different ending: {s}"]  # fmt: skip

ZH_TOPICS = ["彩虹", "地震", "睡眠", "茶叶", "电池", "月食", "高铁", "长城", "春节", "面包", "人工智能", "气候变化", "疫苗", "海洋", "沙漠", "鲸鱼",
             "蜜蜂", "围棋", "书法", "京剧", "自行车", "太阳能", "垃圾分类", "时间管理", "理财", "跑步", "养猫", "做饭", "旅行", "读书", "写作", "面试",
             "学习英语", "压力", "友谊", "家庭教育", "摄影", "音乐", "园艺", "火山"]  # fmt: skip
ZH_CHAT = ["请用简单的话解释{t}。", "关于{t}，有哪些常见的误解？", "请写一段介绍{t}的文字，大约一百字。", "请列出关于{t}的五个建议。", "{t}为什么重要？",
           "请写一首关于{t}的短诗。", "我想了解{t}，应该从哪里开始？", "请比较{t}和{u}。"]  # fmt: skip
ZH_TASKS = ["判断一个数是否为质数", "反转一个字符串", "计算列表的平均值", "去掉列表中的重复元素", "统计文本中每个单词出现的次数", "合并两个有序列表", "实现二分查找",
            "读取 CSV 文件并求和", "计算斐波那契数列的第 n 项", "判断闰年", "把列表按长度分组", "找出字典中最大的值", "实现一个栈", "检查括号是否匹配", "生成随机密码"]  # fmt: skip
ZH_CODE = ["请用 Python 写一个函数：{k}。", "请用 Python {k}，并解释代码。", "请用 JavaScript 写一个函数：{k}。", "如何用 Python {k}？请给出例子。"]  # fmt: skip
SYSTEMS = ["You are a helpful assistant.", "You are a patient teacher.", "Answer briefly.", "You are an experienced programmer.",
           "Answer in plain sentences.", "You are a friendly museum guide for children.", "Always give an example."]  # fmt: skip


def make_prompts(count: int = NUM_PROMPTS, seed: int = 20261) -> list[dict[str, object]]:
    """``count`` different prompts in a mixed order: {"id", "task", "messages"}."""
    rng = random.Random(seed)
    topics = [topic.strip() for topic in TOPICS.split("|")]
    tasks = [task.strip() for task in TASKS.split("|")]
    sentences = [sentence.strip() for sentence in SENTENCES.split("|")]

    def chat() -> str:
        return rng.choice(CHAT).format(t=rng.choice(topics), u=rng.choice(topics))

    def letter() -> str:
        return rng.choice(LETTERS).format(p=rng.choice(PEOPLE), m=rng.choice(MATTERS))

    def sums() -> str:
        return rng.choice(SUMS).format(a=rng.randint(12, 480), b=rng.randint(2, 9), c=rng.randint(10, 300))

    def code() -> str:
        return rng.choice(CODE).format(l=rng.choice(LANGUAGES), k=rng.choice(tasks))

    def classes() -> str:
        return rng.choice(CLASS_TASKS).format(l=rng.choice(LANGUAGES), c=rng.choice(CLASSES))

    def concept() -> str:
        return rng.choice(CONCEPT_TASKS).format(c=rng.choice(CONCEPTS))

    def tools() -> str:
        kind = rng.randrange(3)
        if kind == 0:
            return f"Given a table {rng.choice(TABLES)}, write an SQL query that finds {rng.choice(QUERIES)}."
        if kind == 1:
            return f"Write a shell command that {rng.choice(SHELL)}, and explain its parts."
        return f"Write a regular expression that matches {rng.choice(PATTERNS)}, with an example in {rng.choice(LANGUAGES)}."

    def broken() -> str:
        return rng.choice(BROKEN_TASKS).format(b=rng.choice(BROKEN))

    def rewrite() -> str:
        return rng.choice(REWRITES).format(s=rng.choice(sentences))

    def chinese() -> str:
        if rng.random() < 0.35:
            return rng.choice(ZH_CODE).format(k=rng.choice(ZH_TASKS))
        return rng.choice(ZH_CHAT).format(t=rng.choice(ZH_TOPICS), u=rng.choice(ZH_TOPICS))

    makers = [(chat, "chat", 34), (letter, "chat", 6), (sums, "math", 4), (code, "code", 17), (classes, "code", 7),
              (concept, "code", 8), (tools, "code", 6), (broken, "code", 6), (rewrite, "rewrite", 5), (chinese, "zh", 11)]  # fmt: skip
    weights = [weight for _, _, weight in makers]
    seen: set[str] = set()
    prompts: list[dict[str, object]] = []
    while len(prompts) < count:
        make, task, _ = rng.choices(makers, weights)[0]
        text = make()
        if text in seen:
            continue
        seen.add(text)
        messages = [{"role": "user", "content": text}]
        if task != "zh" and rng.random() < 0.1:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        prompts.append({"id": f"train-{len(prompts):04}", "task": task, "messages": messages})
    return prompts


def main() -> int:
    text = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in make_prompts())
    path = DATA / "training_prompts.jsonl"
    if "--check" in sys.argv[1:]:
        return int(path.read_text(encoding="utf-8") != text)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
